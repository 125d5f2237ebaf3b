"""Hide secrets: by the names of options, variables and keys, by known values, and by the forms that tokens have."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

T = TypeVar("T")


def listed(words: str) -> frozenset[str]:
    """Return the words of a text, as a set."""
    return frozenset(words.split())


HIDDEN = "(hidden)"

_LEAST = 8  # characters of a value that is hidden everywhere: a shorter one may be an ordinary word
_COMMON = listed(
    "default disabled enabled required optional kerberos password passphrase username localhost anonymous "
    "undefined keychain automatic external internal negotiate"
)
# Keys that well-known services issue begin in ways of their own.
_TOKEN = re.compile(
    r"\b(?:gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]*\d)[\w-]{16,}"
    r"|[sr]k_(?:live|test)_\w{8,}|xox[abeprs]-[\w-]{8,}|glpat-[\w.-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}"
    r"|ya29\.[\w-]{8,}|eyJ[\w-]{8,}(?:\.[\w.-]+)?|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{16,}|nvapi-[\w-]{16,}"
    r"|dapi[0-9a-f]{32}|dop_v1_[0-9a-f]{16,}|ATATT[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]+|AGE-SECRET-KEY-\w+)"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)[\w/-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_IN_URL = re.compile(r"(\w://)(?:[^/\s@:\"']*:)?(?P<password>[^/\s\"']+)@")
_SIGNATURE = re.compile(r"([?&](?:[\w-]*-)?(?:sig|signature|key)=)[^&\s\"'#]+", re.IGNORECASE)
_BEARER = re.compile(r"\b(Bearer\s+)(?!\(hidden)[\w.~+/=-]{8,}", re.IGNORECASE)
# A name and what stands between it and its value. Names are bounded: a long text without any must not take long.
_NAMED = re.compile(r"(?P<name>[A-Za-z_][\w.-]{0,80})(?P<sign>\\*[\"']?\s{0,9}(?:=>|:=|=(?!=)|:(?!:|//))\s{0,9})")
_OPTION = re.compile(r"(?<![\w-])(?P<name>--?[A-Za-z][\w.-]{0,80})(?P<sign>\s{1,9})(?!-)")
_VALUE = re.compile(
    r"""\(hidden\)|\\+"(?P<escaped>.*?)\\+"|"(?P<double>(?:\\.|[^"\\])*)"|'(?P<single>(?:\\.|[^'\\])*)'"""
    r"""|(?:Bearer|Basic|Digest|Token|ApiKey)\s+[^\s,;'"]+|(?:[^\s,;&'"}\])]|,(?![\s"']|[\w.-]+[=:]))+""",
    re.DOTALL,
)
_NOTHING = frozenset(["null", "None", "true", "false", "True", "False", "", HIDDEN])
_JSON_BEGINS = re.compile(r"[{\[]\s{0,9}[\"{\[]")
_MOST_JSON = 100  # in one text
_QUOTED_QUOTE = "'\"'\"'"  # a quote within quotes, as shlex.join writes it
_REST = re.compile(r"""[^\s,;'"{}\[\]#][^\n,;}\]]*""")  # what a line of YAML says after a name: it may hold spaces
_LINE_BEGINS = re.compile(r"(?:^|[\n{,])[ \t]*(?:- )?[\"']?\Z")
_NUMBER_OR_ADDRESS = re.compile(r"\w+://|[-+]?[\d_]*\.?[\d_]*(?:[eE][-+]?\d+)?\Z")
_NAME_WORD = re.compile(r"[+~-]*[\w.\-/@:\[\]]+")
_OPTION_WORD = re.compile(r"--?[A-Za-z][\w.-]*(?:=.*)?", re.DOTALL)


def text(said: str) -> str:
    """Return a text without the secrets in it; JSON stays JSON."""
    return _Hider(_known()).text(said)


def values(said: str) -> str:
    """Return a text without known secrets, services' keys, and passwords in addresses. Names are not checked."""
    return _Hider(_known()).values(said)


def words(said: Sequence[str]) -> list[str]:
    """Return a command line without secrets: the values of options such as --token, and secrets within other words."""
    return _hidden(_Hider.words, said)


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables without secrets."""
    return _hidden(_Hider.variables, environment)


def document(value: Any) -> Any:
    """Return a JSON value without secrets, also in nested mappings, lists and texts."""
    return _hidden(_Hider.document, value)


def strings(value: Any) -> Any:
    """Return a JSON value without secrets in its texts. Names are not checked: "token" may be a metric."""
    if isinstance(value, dict):
        return {name: strings(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [strings(each) for each in value]
    return text(value) if isinstance(value, str) else value


def _hidden(method: Callable[[_Hider, Any], T], said: Any) -> T:
    """Return what a method of `_Hider` returns once it has the secrets in `said` itself."""
    first = _Hider()
    method(first, said)
    return method(_Hider(_known() | first.found), said)


def _known() -> frozenset[str]:
    return _of_process(tuple(os.environ.items()), tuple(sys.argv))


@functools.lru_cache(maxsize=8)
def _of_process(environment: tuple[tuple[str, str], ...], argv: tuple[str, ...]) -> frozenset[str]:
    """Return the values of secrets in this process's environment and command line."""
    hider = _Hider()
    hider.variables(dict(environment))
    hider.words(argv)
    return frozenset(hider.found)


class _Hider:
    """Hides secrets and `known` values, and collects in `found` the values that names show to be secrets."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.found: set[str] = set()
        self._known = _pattern(frozenset(filter(_is_distinct, known)))

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {name: (self._secret if is_secret(name) else self.text)(value) for name, value in environment.items()}

    def words(self, said: Sequence[str]) -> list[str]:
        shown, is_value = [], False  # the value of an option such as --token
        for word in said:
            is_value = is_value and not _OPTION_WORD.fullmatch(word)
            shown.append(self._secret(word) if is_value else self._word(word))
            is_value = not is_value and word.startswith("-") and "=" not in word and is_secret(word)
        return shown

    def document(self, value: Any) -> Any:
        try:
            return self._document(value)
        except RecursionError:  # nested too deep to be checked
            return HIDDEN

    def text(self, said: str) -> str:
        if _QUOTED_QUOTE in said:
            with contextlib.suppress(ValueError):  # no shell's line
                return shlex.join(self.words(shlex.split(said)))
        parts, at = [], 0
        for start, end, parsed in _json_in(said):
            hidden = self.document(parsed)
            inner = said[start:end] if hidden == parsed else json.dumps(hidden, ensure_ascii=False)
            parts += [self._prose(said[at:start]), self.values(inner)]
            at = end
        return "".join([*parts, self._prose(said[at:])])

    def values(self, said: str) -> str:
        said = _IN_URL.sub(self._in_url, _TOKEN.sub(HIDDEN, self._known.sub(HIDDEN, said)))
        return _BEARER.sub(rf"\1{HIDDEN}", _SIGNATURE.sub(rf"\1{HIDDEN}", said))

    def _in_url(self, found: re.Match[str]) -> str:
        self.found.add(found["password"])
        return f"{found[1]}{HIDDEN}@"

    def _secret(self, value: Any) -> Any:
        if value is None or value == "" or isinstance(value, bool):
            return value
        if isinstance(value, str):
            self.found.add(value)
            self.text(value)  # collects what JSON in it calls a secret
        return HIDDEN

    def _word(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if not equals or not _NAME_WORD.fullmatch(name):
            return self.text(word)
        return f"{name}={self._secret(value) if is_secret(name) else self._word(value)}"  # --override=a.api_key=...

    def _document(self, value: Any, *, hide: bool = False) -> Any:
        if isinstance(value, dict):
            # {"name": "HF_TOKEN", "value": ...}, as manifests have variables
            is_pair = any(isinstance(value.get(each), str) and is_secret(value[each]) for each in ("name", "key"))
            return {
                self.text(name) if isinstance(name, str) else name: self._document(
                    each, hide=hide or is_secret(str(name)) or (is_pair and name in ("value", "default"))
                )
                for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            if value and not hide and all(isinstance(each, str) for each in value):
                return self.words(value)  # perhaps a command line
            return [self._document(each, hide=hide) for each in value]
        if hide:
            return self._secret(value)
        return self.text(value) if isinstance(value, str) else value

    def _prose(self, said: str) -> str:
        return _hide_named(_hide_named(self.values(said), _OPTION), _NAMED)


def _hide_named(said: str, pattern: re.Pattern[str]) -> str:
    parts, at = [], 0
    for found in pattern.finditer(said):
        if found.start() < at or not is_secret(found["name"], in_prose=pattern is _NAMED):
            continue
        in_yaml = ":" in found["sign"] and found["sign"].endswith(" ") and _LINE_BEGINS.search(said, 0, found.start())
        value = (in_yaml and _REST.match(said, found.end())) or _VALUE.match(said, found.end())
        if value is None or value.end() == found.end() or value[0].strip("\"'") in _NOTHING:
            continue
        inner = next((name for name, each in value.groupdict().items() if each is not None), 0)
        parts += [said[at : value.start(inner)], HIDDEN]
        at = value.end(inner)
    return "".join([*parts, said[at:]])


def _json_in(said: str) -> Iterator[tuple[int, int, Any]]:
    """Yield begin, end and value of each JSON mapping and list in a text."""
    at = 0
    for found in itertools.islice(_JSON_BEGINS.finditer(said), _MOST_JSON):
        if found.start() < at:
            continue
        try:
            parsed, at = _DECODER.raw_decode(said, found.start())
        except (ValueError, RecursionError):
            continue
        yield found.start(), at, parsed


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping of JSON; a ValueError for a name that is there twice: its first value would go unseen."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_no_twins)


@functools.lru_cache(maxsize=64)
def _pattern(found: frozenset[str]) -> re.Pattern[str]:
    forms = {form for each in found for form in (each, *_spellings(each))}
    # The longest first: one may be the beginning of another. (?!) matches nowhere.
    return re.compile("|".join(map(re.escape, sorted(forms, key=lambda each: (-len(each), each)))) or "(?!)")


def _spellings(value: str) -> Iterator[str]:
    """Yield the spellings of a value in JSON, in addresses and in Python."""
    yield from (text[1:-1] for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)))
    encoded = value.encode("utf-8", "surrogateescape")
    yield from (quote(encoded), quote(encoded, safe=""), quote_plus(encoded))


def _is_distinct(value: str) -> bool:
    """Return whether a value can be hidden in the whole text: it is no word, number, path or address."""
    if len(value) < _LEAST or value.lower() in _COMMON or value.startswith(("/", "~", "./", "../", "file:", HIDDEN)):
        return False
    return not _NUMBER_OR_ADDRESS.match(value)


# ---- names

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")

# Parts of a name that mark a secret at any place, also without a separator as in dbpassword.
_STEM = re.compile(r"secret(?!ar)|passw|passphrase|passcode|credential|apikey|accesskey|privatekey|webhook|pwd")
_SETTINGS = listed("length len policy required enabled timeout file path dir")  # beside a secret: password_length
_ALONE = listed("auth oauth authorization authentication bearer cookie cookies cred creds jwt otp token")
_RUN_TOGETHER = re.compile(
    r"(?:api|auth|access|refresh|bearer|my|hf|gh|git|bot|user|session)token|(?:basic|http)auth"
    r"|(?:ssh|db|pg|my|mysql|root|user|admin|smtp|ftp)pass"
)
_KEYS = re.compile(r"(?:api|access|secret|private|ssh|auth|wandb|pass|job|account|encryption|signing)keys?")
# What a name may end with after its key: AWS_ACCESS_KEY_ID, API_KEY_2.
_AFTER_KEY = listed("id value b64 base64 hex string str raw prod dev test")
_KEEPERS = listed("api access secret private ssh auth account encryption signing")
_SAFE_AFTER = listed(
    "type types id ids dim size count counts embedding embeddings embed length len budget limit level dropout "
    "mixer mixing merging merge shift loss losses acc accuracy classification class choice rate pos position "
    "positions idx index weight weights mask drop keep pruning routing per method mode scheme backend provider "
    "enabled required sock url uri endpoint host port timeout ttl expiry expires file path"
)
# Words before "token" that speak of language models, not of access.
_SAFE_BEFORE_TOKEN = listed(
    "pad eos bos sos eot mask unk cls sep special image start end stop begin first last next prev previous per "
    "num n max min extra added prefix suffix class dist register learned text audio video vision patch prompt "
    "query input output target decoder encoder forced mem memory global local summary time each every new sub "
    "additional"
)
_SAFE_BEFORE_KEY = listed(
    "sort primary foreign image img label text caption input output target feature data dataset batch group "
    "partition join order cache row column col dict map json mask sample state metric monitor loss query prompt "
    "index idx config public hash value field x y video audio class name prng rng random split shard shuffle "
    "answer question meta unique time prefix suffix env attribute attr param parameter model layer head context "
    "source src dst task title any arrow hot short no is num n object dictionary lookup nested"
)
_SAFE_BEFORE_PASS = listed(
    "first second third single one two three by num n forward backward per max min multi high low band last each "
    "this next warmup all full fwd bwd train eval"
)


@functools.lru_cache(maxsize=4096)
def is_secret(name: str, *, in_prose: bool = False) -> bool:
    """Return whether a value of this name, such as --api-key or HF_TOKEN, is a secret; in prose "key" is a word."""
    if name in ("PWD", "OLDPWD") or (in_prose and name.lower() in ("key", "auth", "pat", "pw")):  # the shell's folders
        return False
    words = [word.lower() for word in _WORD.findall(name)]
    if any(_STEM.search(part) for part in (*words, "".join(words[-2:]))):
        return words[-1] not in _SETTINGS
    return any(_tells(words, index) for index in range(len(words)))


def _tells(words: list[str], index: int) -> bool:
    """Return whether the word at `index` says that the name is a secret's."""
    word, before = words[index], words[index - 1] if index else ""
    rest = [each for each in words[index + 1 :] if not each.isdigit()]
    if word in _ALONE or _RUN_TOGETHER.fullmatch(word):
        return not (rest and rest[0] in _SAFE_AFTER) and not (word == "token" and before in _SAFE_BEFORE_TOKEN)
    if word in ("pat", "pw"):
        return not rest
    if _KEYS.fullmatch(word) or (word in ("key", "keys") and before in _KEEPERS):
        return not (rest and rest[0] in _SAFE_AFTER - _AFTER_KEY)
    if word == "key":
        return set(rest) <= {"id", "hex", "b64", "base64"} and before not in _SAFE_BEFORE_KEY
    if word == "pass":
        return index > 0 and not rest and not before.isdigit() and before not in _SAFE_BEFORE_PASS
    return word in ("connection", "conn") and rest[:1] in (["string"], ["str"])

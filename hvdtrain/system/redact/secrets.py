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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus

from hvdtrain.system.redact.names import is_secret, listed

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
_IN_URL = re.compile(r"(\w://)[^/\s\"']+@")
_URL_PASSWORD = re.compile(r"\w://(?:[^/\s@:]*:)?([^/\s\"']+)@")
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
_NAME_WORD = re.compile(r"[+~-]*[\w.\-/@:\[\]]+")
_OPTION_WORD = re.compile(r"--?[A-Za-z][\w.-]*(?:=.*)?", re.DOTALL)


def text(said: str) -> str:
    """Return a text without the secrets in it; JSON stays JSON."""
    return _text(said, _known())


def words(said: Sequence[str]) -> list[str]:
    """Return a command line without secrets: the values of options such as --token, and secrets within other words."""
    return _words(said, _known(_of_words(said)))


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables without secrets."""
    known = _known(_of_variables(environment))
    return {name: _named(name, value, known) for name, value in environment.items()}


def document(value: Any) -> Any:
    """Return a JSON value without secrets, also in nested mappings, lists and texts."""
    try:
        return _document(value, _known(_of_document(value)))
    except RecursionError:  # nested too deep to be checked
        return HIDDEN


def strings(value: Any) -> Any:
    """Return a JSON value without secrets in its texts. Names are not checked: "token" may be a metric."""
    if isinstance(value, dict):
        return {name: strings(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [strings(each) for each in value]
    return text(value) if isinstance(value, str) else value


def values(said: str) -> str:
    """Return a text without known secrets, services' keys, and passwords in addresses. Names are not checked."""
    return _values(said, _known())


# ---- hiding


def _document(value: Any, known: re.Pattern[str], *, hide: bool = False) -> Any:
    if isinstance(value, dict):
        # {"name": "HF_TOKEN", "value": ...}, as manifests have variables
        is_pair = any(isinstance(value.get(each), str) and is_secret(value[each]) for each in ("name", "key"))
        return {
            _text(name, known) if isinstance(name, str) else name: _document(
                each, known, hide=hide or is_secret(str(name)) or (is_pair and name in ("value", "default"))
            )
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        if value and not hide and all(isinstance(each, str) for each in value):
            return _words(value, known)  # perhaps a command line
        return [_document(each, known, hide=hide) for each in value]
    if hide and value is not None and value != "" and not isinstance(value, bool):
        return HIDDEN
    return _text(value, known) if isinstance(value, str) else value


def _words(said: Sequence[str], known: re.Pattern[str]) -> list[str]:
    return [HIDDEN if is_hidden else _word(word, known) for word, is_hidden in _marked(said)]


def _marked(said: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield each word of a command line, and whether it is the value of an option such as --token."""
    is_value = False
    for word in said:
        is_value = is_value and not _OPTION_WORD.fullmatch(word)
        yield word, is_value
        is_value = not is_value and word.startswith("-") and "=" not in word and is_secret(word)


def _word(word: str, known: re.Pattern[str]) -> str:
    name, equals, value = word.partition("=")
    if not equals or not _NAME_WORD.fullmatch(name):
        return _text(word, known)
    return f"{name}={_named(name, value, known, inner=_word)}"  # --override=logger.api_key=...


def _named(name: str, value: str, known: re.Pattern[str], *, inner: Any = None) -> str:
    if is_secret(name):
        return HIDDEN if value else value
    return str((inner or _text)(value, known))


def _text(said: str, known: re.Pattern[str]) -> str:
    if _QUOTED_QUOTE in said:
        with contextlib.suppress(ValueError):  # no shell's line
            return shlex.join(_words(shlex.split(said), known))
    parts, at = [], 0
    for start, end, parsed in _json_in(said):
        try:
            hidden = _document(parsed, known)
        except RecursionError:
            hidden = HIDDEN
        inner = said[start:end] if hidden == parsed else json.dumps(hidden, ensure_ascii=False)
        parts += [_prose(said[at:start], known), _values(inner, known)]
        at = end
    return "".join([*parts, _prose(said[at:], known)])


def _prose(said: str, known: re.Pattern[str]) -> str:
    return _hide_named(_hide_named(_values(said, known), _OPTION), _NAMED)


def _values(said: str, known: re.Pattern[str]) -> str:
    said = _IN_URL.sub(rf"\1{HIDDEN}@", _TOKEN.sub(HIDDEN, known.sub(HIDDEN, said)))
    return _BEARER.sub(rf"\1{HIDDEN}", _SIGNATURE.sub(rf"\1{HIDDEN}", said))


def _hide_named(said: str, pattern: re.Pattern[str]) -> str:
    parts, at = [], 0
    for found in pattern.finditer(said):
        if found.start() < at or not is_secret(found["name"], in_prose=pattern is _NAMED):
            continue
        value = _value_at(said, found)
        if value is None or value.end() == found.end() or value[0].strip("\"'") in _NOTHING:
            continue
        inner = next((name for name, each in value.groupdict().items() if each is not None), 0)
        parts += [said[at : value.start(inner)], HIDDEN]
        at = value.end(inner)
    return "".join([*parts, said[at:]])


def _value_at(said: str, found: re.Match[str]) -> re.Match[str] | None:
    """Return the value after a name."""
    if ":" in found["sign"] and found["sign"].endswith(" ") and _LINE_BEGINS.search(said, 0, found.start()):
        return _REST.match(said, found.end()) or _VALUE.match(said, found.end())
    return _VALUE.match(said, found.end())


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


# ---- known values


def _known(more: Iterator[str] | None = None) -> re.Pattern[str]:
    """Return what finds the values of secrets: of this process's environment and command line, and more."""
    found = {*_of_variables(os.environ), *_of_words(sys.argv), *(more or ())}
    return _pattern(frozenset(each for each in found if _is_distinct(each)))


@functools.lru_cache(maxsize=64)
def _pattern(found: frozenset[str]) -> re.Pattern[str]:
    forms = {form for each in found for form in (each, *_spellings(each))}
    # The longest first: one may be the beginning of another. (?!) matches nowhere.
    return re.compile("|".join(map(re.escape, sorted(forms, key=lambda each: (-len(each), each)))) or "(?!)")


def _spellings(value: str) -> Iterator[str]:
    """Yield how a value stands in JSON, in addresses and in Python."""
    yield from (text[1:-1] for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)))
    encoded = value.encode("utf-8", "surrogateescape")
    yield from (quote(encoded), quote(encoded, safe=""), quote_plus(encoded))


def _is_distinct(value: str) -> bool:
    """Return whether a value can be hidden everywhere: it is no word, number, path or address."""
    if len(value) < _LEAST or value.lower() in _COMMON or value.startswith(("/", "~", "./", "../", "file:", HIDDEN)):
        return False
    try:
        float(value)
    except ValueError:
        return not re.match(r"\w+://", value)
    return False


def _of_variables(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if is_secret(name):
            yield value
        for _, _, parsed in _json_in(value):
            yield from _of_document(parsed)
        for found in _URL_PASSWORD.finditer(value):
            yield found[1]


def _of_words(said: Sequence[str]) -> Iterator[str]:
    for word, is_value in _marked(said):
        if is_value:
            yield word
        name, equals, value = word.partition("=")
        while equals and _NAME_WORD.fullmatch(name):  # --override=logger.api_key=...
            if is_secret(name):
                yield value
                break
            name, equals, value = value.partition("=")
        for _, _, parsed in _json_in(word):
            yield from _of_document(parsed)


def _of_document(value: Any, *, hide: bool = False) -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _of_document(each, hide=hide or is_secret(str(name)))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _of_document(each, hide=hide)
    elif hide and isinstance(value, str):
        yield value

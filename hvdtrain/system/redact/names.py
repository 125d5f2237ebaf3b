"""Which names are a secret's: of options, variables and keys."""

from __future__ import annotations

import functools
import re


def listed(words: str) -> frozenset[str]:
    """Return the words of a text, as a set."""
    return frozenset(words.split())


_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")

# Parts of a name that mark a secret at any place, also without a separator as in dbpassword.
_STEM = re.compile(r"secret(?!ar)|passw|passphrase|passcode|credential|apikey|accesskey|privatekey|webhook|pwd")
_FOLDERS = frozenset({"PWD", "OLDPWD"})  # the shell's
_SETTINGS = listed("length len policy required enabled timeout file path dir")  # beside a secret: password_length
_ALONE = listed("auth oauth authorization authentication bearer cookie cookies cred creds jwt otp token")
_LAST = listed("pat pw apitoken authtoken accesstoken")
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


def is_secret(name: str, *, in_prose: bool = False) -> bool:
    """Return whether what has this name, such as --api-key, HF_TOKEN or logger.apiKey, is to be hidden.

    With `in_prose`, the name was found in a text, where a lone "key" or "auth" is an ordinary word.
    """
    return _is_secret(name) and not (in_prose and name.lower() in ("key", "auth", "pat", "pw"))


@functools.lru_cache(maxsize=4096)
def _is_secret(name: str) -> bool:
    if name in _FOLDERS:
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
    if word in _LAST:
        return not rest
    if _KEYS.fullmatch(word) or (word in ("key", "keys") and before in _KEEPERS):
        return not (rest and rest[0] in _SAFE_AFTER - _AFTER_KEY)
    if word == "key":
        return set(rest) <= {"id", "hex", "b64", "base64"} and before not in _SAFE_BEFORE_KEY
    if word == "pass":
        return index > 0 and not rest and not before.isdigit() and before not in _SAFE_BEFORE_PASS
    return word in ("connection", "conn") and rest[:1] in (["string"], ["str"])

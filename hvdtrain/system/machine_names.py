"""Remove the names of people and machines from a text, also of other hosts, whose names are not known beforehand."""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import os
import re
import socket
from collections.abc import Iterable

from hvdtrain.system import redact

_NAME = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_HOME = re.compile(
    r"(/(?:[\w.-]+/)*?(?:home|homes|users?|Users|people|scratch|staff|students))/(?P<user>[^/\s:;,'\"()\[\]]+)"
)
_TILDE = re.compile(r"(?<![\w/.-])~(?P<user>[A-Za-z_][\w-]*)(?=/)")
_ROOT = re.compile(r"(?<![\w.])/root(?![\w.-])")
_ADDRESS = re.compile(
    r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\w)|(?<![\w.:])[0-9a-f]*:[0-9a-f:.]*:[0-9a-f.]*(?![\w:])", re.IGNORECASE
)
# lovelace@node17, but no memcpy@GLIBC_2.14 and no torch@2.13
_AT = re.compile(
    r"(?<![\w.+/@-])(?P<user>[A-Za-z_][\w.+-]*)"
    r"@(?!@|plt\b|GLIBC|GLIBCXX|CXXABI|GCC_|LIBC|NCCL|CUDA|lib|\d+(?:\.\d+)*(?![\w.]))"
    rf"(?:(?P<host>{_NAME})|\[[0-9a-fA-F:.]+\])"
)
_FORMS = tuple(
    (re.compile(pattern, re.IGNORECASE), stand_in)
    for pattern, stand_in in (
        (r"\b[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}\b", "MAC"),
        (r"\benx[0-9a-f]{12}\b", "enxMAC"),  # how systemd names a USB network card
        (r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "UUID"),
        (r"\bip-\d{1,3}(?:-\d{1,3}){3}\b", "HOST"),  # Amazon's
    )
)
# Names that end as hosts' do. Left out: what Python, C and file names end with, such as py, so, sh, is, at, int.
_ENDS = (
    "com|org|net|edu|gov|mil|info|io|ai|dev|cloud|app|eu|de|fr|uk|nl|ch|be|dk|se|fi|pl|cz|us|ca|au|jp|cn|kr|tw|hk|ru|"
    "br|mx|hu|gr|ie|local|internal|intranet|intra|lan|corp|private|home|localdomain|cluster|hpc|slurm|svc|lab|"
    "example|invalid"
)
_QUALIFIED = re.compile(
    rf"(?<![\w./@-])(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+(?:{_ENDS}|(?:ac|co|edu|gov|org)\.[a-z]{{2}})(?![\w-]|\.\w)",
    re.IGNORECASE,
)
# Where messages of ssh, Open MPI, NCCL, Slurm, Horovod and hvdtrain have the names of hosts and users.
_IN_PLACE_OF = {"HOST": f"(?P<host>{_NAME})", "USER": r"(?P<user>[A-Za-z_][\w.-]*\w)", "ONE": _NAME}
_PLACES = (
    _HOME, _TILDE, _AT,
    *(re.compile(re.sub("HOST|USER|ONE", lambda found: _IN_PLACE_OF[found[0]], pattern), re.IGNORECASE | re.MULTILINE)
      for pattern in (
        r"resolve hostname HOST", r"connect to (?:host )?HOST port", r"(?:closed|reset) by (?:remote host )?HOST port",
        r"connection to HOST (?:closed|port|timed)", r"permanently added '\[?HOST", r"authenticity of host '\[?HOST",
        r"host key for \[?HOST", r"^HOST: Permission denied", r"^HOST: (?:command not found|connection)",
        r"^\[?HOST[:,]\d+(?:[:,]\d+)*\]? (?:\[\d+\] )?(?:NCCL|\*\*\*|PMIX|PRTE|ORTE|OPAL|MPI|mca|btl|more|\[)",
        r"^\[HOST:\d+\]", r"^srun: error: HOST:",
        r"\b(?:node ?names?|hostnames?|(?:local|remote|peer) host)\s*[:=]\s*['\"]?HOST",
        r"^\s*(?:host|node|peer|server)\s*[:=]\s*['\"]?HOST",
        r"\b(?:on|to|from|of|at) (?:the )?(?:host|node|server) ['\"]?HOST",
        r"(?<![\w-])(?:-H|--?hosts?|--?hostname)[ =]['\"]?(?P<host>ONE(?::\d+)?(?:,ONE(?::\d+)?)*)",
        r"\bhosts (?P<host>ONE(?:, ONE)* and ONE)", r"\bhosts?(?:\(s\))?: ['\"]?HOST",
        r"\bhost ['\"]?(?=[\w.-]*\d)HOST", r"\b(?:connect|connecting|connection) (?:to|from|with) \[?HOST\]?:\d",
        r"\b(?:user|login|logname|username|account)\s*[:=]\s*['\"]?USER", r"\b(?:uid|gid)=\d+\(USER\)",
        r"\b(?:for|as|by|of) (?:invalid )?user ['\"]?USER", r"\bowned by ['\"]?USER", r"\b(?:-l|--login) USER",
    )),
)  # fmt: skip
_IN_ADDRESS = re.compile(r"(?<=\w://)[\w.-]+")
# Words that may stand in the place of a name, and public addresses.
_NO_NAMES = redact.listed(
    "a all alone an and any are as at be by can cannot cpu did do does each every file files for from gpu had has "
    "have here host hosts if in is it its itself key keys list may memory must name named names network no nobody "
    "none nor not of off on one only or other others port ports process rank ranks root s so some that the their "
    "there these they this to true false unknown unreachable us user users was were where which who will with "
    "without you your localhost app build data default runner shared ubuntu debian work lib bin train test python "
    "conda anaconda3 miniconda3"
)
_PUBLIC = redact.listed(
    "github.com pypi.org files.pythonhosted.org pytorch.org download.pytorch.org docs.nvidia.com "
    "developer.nvidia.com readthedocs.io keras.io tensorflow.org open-mpi.org www.open-mpi.org docs.open-mpi.org "
    "python.org docs.python.org"
)
_Names = Iterable[str] | None


class Scrubber:
    """Removes names of people and machines from a text, and what looks like a secret.

    Names of this machine and this account are known. Others are found where messages and paths have names, and then
    hidden in the whole text.

    Args:
        users: names of accounts; of this process's by default.
        hosts: names of machines; this one's, and those that the environment names, by default.
        homes: folders shown as ~; this account's by default.
        keep: words that tell nothing even if an account or a machine is called so.
    """

    def __init__(
        self, *, users: _Names = None, hosts: _Names = None, homes: _Names = None, keep: Iterable[str] = ()
    ) -> None:
        self._kept = {"root", "localhost", "", *keep}
        self._users = _users() if users is None else set(users)
        self._hosts = _hosts() if hosts is None else set(hosts)
        homes = {os.path.expanduser("~")} if homes is None else homes  # "~" itself if it is not known
        # The longest first: a name may be the beginning of another one.
        self._homes = sorted((home.rstrip("/") for home in homes if len(home.rstrip("/")) > 1), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Return the text without them."""
        for home in self._homes:
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
        text = redact.values(_ROOT.sub("~", text))
        users = self._users | self._found("user", text)
        text = _TILDE.sub("~USER", _HOME.sub(r"\1/USER", text))
        hosts = self._hosts | self._found("host", text)
        hosts |= {host.partition(".")[0] for host in hosts if not _address(host)}
        text = _AT.sub(lambda found: f"USER@{self._shown(found[0].rpartition('@')[2])}", text)
        text = _IN_ADDRESS.sub(lambda found: self._shown(found[0]), text)
        # Names before assignments: a host's may hold a word such as "secret".
        for names, stand_in in ((hosts, "HOST"), (users, "USER")):
            longest_first = sorted(sorted(names - self._kept), key=len, reverse=True)
            any_of = "|".join(map(re.escape, longest_first)) or "(?!)"  # which matches nowhere
            text = re.sub(rf"(?<![\w-])(?:{any_of})(?![\w-])", stand_in, text, flags=re.IGNORECASE)
        text = redact.text(_QUALIFIED.sub(lambda found: self._shown(found[0]), text))
        for pattern, stand_in in _FORMS:
            text = pattern.sub(stand_in, text)
        return _ADDRESS.sub(lambda found: _address(found[0]) or found[0], text)

    def _found(self, kind: str, text: str) -> set[str]:
        """Return the names of users or of hosts that stand where messages and paths have them."""
        places = [found[kind] or "" for each in _PLACES if kind in each.groupindex for found in each.finditer(text)]
        # A place may hold several hosts; a path's user may have any characters.
        names = {name for place in places for name in ([place] if kind == "user" else re.findall(_NAME, place))}
        return set(filter(self._is_name, names))

    def _is_name(self, word: str) -> bool:
        """Return whether a word that stands where a name does is one."""
        plain = word.lower()
        if plain in _NO_NAMES or plain in self._kept or plain in _PUBLIC or len(plain) < 2:
            return False
        return not re.fullmatch(
            r"[\d.]+|USER|HOST|ADDRESS|MAC|\d+(?:\.\d+)+\S*|\S+\.(?:py|so|c|cc|h|sh|yaml|json)", word
        )

    def _shown(self, host: str) -> str:
        if host.lower() in _PUBLIC or host in self._kept:
            return host
        return _address(host.strip("[]")) or "HOST"


def _users() -> set[str]:
    names = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    with contextlib.suppress(OSError, KeyError):  # a container's user may have no name
        names.add(getpass.getuser())
    return names


def _hosts() -> set[str]:
    found = {socket.gethostname(), socket.getfqdn()}
    for name, value in os.environ.items():
        if name.endswith(("HOSTNAME", "_HOST", "HOSTS", "MASTER_ADDR")) or name == "HOST":
            found |= {host for host in re.split(r"[\s,:]+", value) if re.search("[A-Za-z]", host)}
    return {host for host in found if host.lower() not in _NO_NAMES}


def _address(text: str) -> str:
    """Return what an address is shown as; "" where `text` is none."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return ""
    return text if found.is_loopback or found.is_unspecified else "ADDRESS"

"""Leave out of what is shown or kept whatever is secret, or says who and where somebody is."""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence

HIDDEN = "(hidden)"

# Not a tokenizer, nor a number of tokens.
SECRET = re.compile(
    r"secret|token(?!i[sz]|s)|pass(?:w|phrase|$)|pwd|credential|auth(?!or)|(^|[-_.]|api)key(?:[-_]id)?$", re.IGNORECASE
)
# An assignment such as API_KEY=..., password: ... or --token ... inside a longer text.
_NAMED = r"[\w.-]*(?:secret|token(?!i[sz]|s)|passw|pwd|credential|api[-_]?key|access[-_]?key)[\w-]*"
_ASSIGNED = re.compile(rf"""({_NAMED}['"]?\s*[=:]\s*['"]?|--{_NAMED}\s+)[^\s'",;]+""", re.IGNORECASE)
# Keys that well-known services issue begin in ways of their own.
_TOKEN = re.compile(
    r"\b(?:gh[pousr]_|github_pat_|hf_|sk-|xox[abprs]-|glpat-|AKIA|ASIA|AIza|eyJ)[\w.-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_IN_URL = re.compile(r"(\w+://)[^/\s@]+@")
_HOME = re.compile(r"(/home|/Users)/[^/\s:;,'\"()]+")
_ROOT = re.compile(r"(?<![\w.])/root(?![\w.-])")
_MAC = re.compile(r"\b[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5}\b", re.IGNORECASE)
_MAC_IN_NAME = re.compile(r"\benx[0-9a-f]{12}\b", re.IGNORECASE)  # how systemd names a USB network card
_ADDRESS = re.compile(
    r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\w)|(?<![\w.:])[0-9a-f]*:[0-9a-f:.]*:[0-9a-f.]*(?![\w:])", re.IGNORECASE
)
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return a command line with the values of options such as --token and --api-key hidden."""
    shown, hide = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        is_secret = bool(SECRET.search(name))
        if hide and not word.startswith("-"):
            shown.append(HIDDEN)
        elif is_secret and equals:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(_without_keys(word))
        hide = is_secret and not equals and word.startswith("-")
    return shown


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the values hidden of those whose names look like a secret's."""
    return {name: HIDDEN if SECRET.search(name) else _without_keys(value) for name, value in environment.items()}


def _without_keys(text: str) -> str:
    """Return a text without the passwords in its addresses and the keys that services issue."""
    return _IN_URL.sub(rf"\1{HIDDEN}@", _TOKEN.sub(HIDDEN, text))


class Scrubber:
    """Takes out of a text what names a person or a machine, and what looks like a secret.

    Args:
        users: names of accounts; of this process's by default.
        hosts: names of machines; this one's by default.
        homes: folders shown as ~; this account's by default.
        keep: words that tell nothing even if an account or a machine is called so.
    """

    def __init__(
        self,
        *,
        users: Iterable[str] | None = None,
        hosts: Iterable[str] | None = None,
        homes: Iterable[str] | None = None,
        keep: Iterable[str] = (),
    ) -> None:
        kept = {"root", "localhost", "", *keep}
        users = _users() if users is None else users
        hosts = [socket.gethostname(), socket.getfqdn()] if hosts is None else hosts
        hosts = {part for host in hosts for part in (host, host.partition(".")[0])}
        homes = {os.path.expanduser("~")} if homes is None else homes  # "~" itself where nobody knows it
        # The longest first: a name may be the beginning of another one.
        self._homes = sorted((home.rstrip("/") for home in homes if len(home.rstrip("/")) > 1), key=len, reverse=True)
        self._names = [_words(sorted(set(hosts) - kept)), _words(sorted(set(users) - kept))]

    def __call__(self, text: str) -> str:
        """Return the text without them."""
        for home in self._homes:
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
        text = _ROOT.sub("~", _HOME.sub(r"\1/USER", text))
        text = _IN_URL.sub(rf"\1{HIDDEN}@", _TOKEN.sub(HIDDEN, text))
        # Names before assignments: a host's may hold a word such as "secret".
        for pattern, stand_in in zip(self._names, ("HOST", "USER"), strict=True):
            text = pattern.sub(stand_in, text) if pattern else text
        text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
        text = interface(_MAC.sub("MAC", text))
        return _UUID.sub("UUID", _ADDRESS.sub(_address, text))


def interface(name: str) -> str:
    """Return a network interface's name without the hardware's address, which some hold."""
    return _MAC_IN_NAME.sub("enxMAC", name)


def _users() -> set[str]:
    names = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    try:
        names.add(getpass.getuser())
    except (OSError, KeyError):  # a container's user may have no name
        pass
    return names


def _words(names: Sequence[str]) -> re.Pattern[str] | None:
    if not names:
        return None
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w-])", re.IGNORECASE)


def _address(match: re.Match[str]) -> str:
    try:
        found = ipaddress.ip_address(match[0])
    except ValueError:
        return match[0]
    return match[0] if found.is_loopback or found.is_unspecified else "ADDRESS"

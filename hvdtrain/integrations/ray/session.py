"""Choose the Ray that a job uses: a running Ray, or a new Ray, which ends with the job.

Ray itself connects to the address in a file that every user can write, and opens its folder to all users.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.horovod_build import owners
from hvdtrain.system import network

log = logging.getLogger("hvdtrain")

_ADDRESS = re.compile(r"([\w.-]{1,200}|\[[\da-fA-F:.]{2,60}\]):(\d{1,5})")
_LISTENS = "0A"  # in /proc/net/tcp
# With it, Ray's sockets stay below the 107 bytes that the path of one may have.
_LONGEST_BASE = 23
_LAST_LINES_S = 0.5  # Ray reads the ranks' output ten times a second


class Session:
    """This process's connection to a Ray, and the Ray itself if the job has started it."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._is_mine = False
        self._folder: Path | None = None

    @property
    def logs(self) -> str:
        """The folder of Ray's own logs, on this host."""
        return str((_base() / "ray" if self._folder is None else self._folder / "r") / "session_latest" / "logs")

    def connect(self) -> None:
        """Connect, if not connected yet: to the Ray of RAY_ADDRESS, to this host's, or to a new one here."""
        if self._ray.is_initialized():
            return
        named = os.environ.get("RAY_ADDRESS", "")
        self._is_mine = True
        if named not in ("", "auto", "local"):
            self._ray.init()
        elif named != "local" and (address := running()):
            _init(self._ray, address)
        elif named == "auto":
            raise UsageError(
                "RAY_ADDRESS is auto, but neither this user nor the system runs a Ray here. Set an address, or unset it"
            )
        else:
            where = _base() if len(str(_base())) <= _LONGEST_BASE else "/tmp"
            self._folder = Path(tempfile.mkdtemp(prefix="hvdtrain-", dir=where))  # this user's alone
            _close_token()
            self._ray.init(address="local", _temp_dir=str(self._folder / "r"))  # Ray opens this folder to all users
            _close_token()  # Ray may have made it just now

    def disconnect(self, *, keep_logs: bool = False) -> None:
        """Disconnect, if `connect` has connected; end the Ray that it started, and remove its folder."""
        if not self._is_mine:
            return
        if self._ray.is_initialized():
            time.sleep(_LAST_LINES_S)
        self._ray.shutdown()
        if self._folder is not None and not keep_logs:
            shutil.rmtree(self._folder, ignore_errors=True)


def running() -> str:
    """Return the address of the Ray that runs here, if this user or the system has started it; "" if none has."""
    path = _base() / "ray" / "ray_current_cluster"
    try:
        # Follow no link, which may be another user's, and do not wait for a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), errors="replace") as file:
            found, text = os.fstat(file.fileno()), ""
            why = owners.who_can_change(path, found=found)
            if not why and stat.S_ISREG(found.st_mode):
                text = file.read(300).strip()
    except FileNotFoundError:
        return ""
    except OSError as problem:
        why, text = str(problem), ""
    match = _ADDRESS.fullmatch(text)
    why = why or (_other_listener(match[1], int(match[2])) if match else f"{path} has no address")
    if why:
        log.warning("%s: a new Ray is started here. To use a running one, set RAY_ADDRESS to its address", why)
        return ""
    return text


def _init(ray: Any, address: str) -> None:
    """Connect to an address by a file that no other user can change: given as an argument, Ray would send no token."""
    before = {name: text for name, text in os.environ.items() if name == "RAY_TMPDIR"}
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        path = Path(folder, "ray", "ray_current_cluster")
        path.parent.mkdir()
        path.write_text(address, encoding="utf-8")
        os.environ["RAY_TMPDIR"] = folder
        try:
            ray.init()
        finally:
            del os.environ["RAY_TMPDIR"]
            os.environ.update(before)


def _base() -> Path:
    """Return the folder in which Ray makes its own by default."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def _other_listener(host: str, port: int) -> str:
    """Return a reason not to trust a port: it is on this host, and another user listens there. Else ""."""
    if not network.is_here([host]):
        return ""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                here = fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port
                if here and not owners.is_ours(int(fields[7])):
                    return f"a process of user {owners.user(int(fields[7]))} listens at port {port} of this host"
    return ""


def _close_token() -> None:
    """Make Ray's token, with which one can run code in every Ray of this user, readable for this user alone."""
    path = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o077:
            path.chmod(0o600)

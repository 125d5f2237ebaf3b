"""The wheel cache: one folder a key, and the key covers everything that changes the wheel."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.horovod_build import edits, sdist
from hvdtrain.horovod_build.errors import CacheError
from hvdtrain.horovod_build.find import Found

_RECORD = "build.json"
_CARRIED = "2"  # the form of what a wheel says of itself, `build.record`


@dataclass(frozen=True)
class Entry:
    """A wheel in the cache, and what it was built from."""

    wheel: Path
    parts: dict[str, str]
    seconds: float


def cache_folder() -> tuple[Path, str]:
    """Return the folder of the cache, and a line where it is not the usual one.

    It is $HVDTRAIN_CACHE, else hvdtrain/ in $XDG_CACHE_HOME, else in ~/.cache. Where the last two cannot be written, as
    in containers, it is .cache/hvdtrain in this environment, which its user owns, unlike a folder in /tmp.

    Raises:
        CacheError: none of them can be written.
    """
    chosen = os.environ.get("HVDTRAIN_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    usual = Path(os.path.abspath(os.path.expanduser(chosen))) if chosen else Path(base) / "hvdtrain"
    if _can_be_written(usual):
        return usual, ""
    own = Path(sys.prefix) / ".cache" / "hvdtrain"
    if not chosen and _can_be_written(own):
        return own, f"{usual} cannot be written: the cache is in {own}"
    raise CacheError(
        f"The cache's folder cannot be written: {usual}{'' if chosen else f', nor can {own}'}. "
        "Set HVDTRAIN_CACHE to a folder that can."
    )


def _can_be_written(folder: Path) -> bool:
    """Return whether files can be made in `folder` and below it; nothing is made to find out."""
    if not folder.is_absolute():  # "~/.cache" where nobody knows this user's home
        return False
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    below = list(folder.iterdir()) if there == folder and os.access(folder, os.R_OK) else []
    return all(os.access(path, os.W_OK | os.X_OK) for path in [there, *filter(os.path.isdir, below)])


def key_parts(found: Found, chosen: dict[str, str]) -> dict[str, str]:
    """Return everything that changes the wheel, by name.

    Args:
        found: what the wheel is built for.
        chosen: the build's settings, from `native.settings`.
    """
    parts = {
        "horovod": sdist.VERSION,
        "sdist": sdist.SHA256,
        "edits": edits.fingerprint(),
        "record": _CARRIED,
        "tools": " ".join(sdist.BUILD_TOOLS),
        "python": f"{sys.implementation.cache_tag} {sysconfig.get_config_var('EXT_SUFFIX')}",
        "platform": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}".strip(),
        "compiler": found.compiler,
        "mpi": f"{found.mpi.version} {'' if found.mpi.library else found.mpi.launcher}" if found.mpi else "",
        "cuda": found.cuda.version if found.gpu and found.cuda else "",
        "nccl": found.nccl.version if found.gpu and found.nccl else "",
    }
    parts |= {f.name: f"{f.version} cuda {f.cuda}" if f.cuda else f.version for f in found.frameworks}
    return parts | {f"env {name}": value for name, value in sorted(chosen.items())}


def key_of(parts: dict[str, str]) -> str:
    """Return the cache's key: a sha256 over all parts, in hex."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Hold the key's lock: of two builds of one wheel at once, the second waits and then finds it done."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def load(folder: Path, key: str) -> Entry | None:
    """Return the cached wheel; None where there is none or its bytes are not those that were written."""
    try:
        record = json.loads((folder / key / _RECORD).read_text(encoding="utf-8"))
        wheel = folder / key / Path(record["wheel"]).name
        if sdist.sha256_of(wheel) == record["sha256"]:
            return Entry(wheel, record["parts"], float(record["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # Missing or damaged: both mean that it must be built.
    return None


def store(folder: Path, key: str, wheel: Path, *, parts: dict[str, str], seconds: float) -> Entry:
    """Copy `wheel` into the cache; the entry appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{key[:12]}-") as scratch:
        made = Path(scratch) / "entry"
        made.mkdir()
        copy = Path(shutil.copy(wheel, made))
        record = {"key": key, "wheel": wheel.name, "sha256": sdist.sha256_of(copy), "seconds": round(seconds, 1)}
        (made / _RECORD).write_text(json.dumps({**record, "parts": parts}, indent=2) + "\n", encoding="utf-8")
        if (folder / key).exists():
            # A rename cannot replace a full folder: the old one leaves with the scratch folder.
            os.rename(folder / key, Path(scratch) / "old")
        os.rename(made, folder / key)
    return Entry(folder / key / wheel.name, parts, seconds)

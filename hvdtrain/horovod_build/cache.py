"""The wheel cache: one folder per key. The key covers everything that changes the wheel."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.horovod_build import changes, library_paths, owners, packages
from hvdtrain.horovod_build.errors import BuildError
from hvdtrain.horovod_build.find import Found

_RECORD = "build.json"
_USED = ("wheels", "build-tools", "sdists", "gpu-proofs")
_CARRIED = "3"  # version of the record in a wheel, `build.record`


@dataclass(frozen=True)
class Entry:
    """A wheel in the cache."""

    wheel: Path
    seconds: float  # that it took


def cache_folder() -> tuple[Path, str]:
    """Return the folder of the cache, which nobody else can change, and a message if it is not the usual one."""
    folder, message = locate()
    check_owners(folder)
    return folder, message


def locate() -> tuple[Path, str]:
    """Return the folder of the cache, and a message if it is not the usual one."""
    # If the usual folder cannot be written, as in containers, and HVDTRAIN_CACHE is not set, use one in this
    # environment: its user owns that, unlike a folder in /tmp.
    chosen = os.environ.get("HVDTRAIN_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    usual = Path(os.path.abspath(os.path.expanduser(chosen))) if chosen else Path(base) / "hvdtrain"
    own = Path(sys.prefix) / ".cache" / "hvdtrain"
    for folder in (usual,) if chosen else (usual, own):
        if _can_be_written(folder):
            return folder, "" if folder == usual else f"{usual} cannot be written: the cache is in {own}"
    raise BuildError(
        f"The cache's folder cannot be written: {usual}{'' if chosen else f', nor can {own}'}. "
        "Set HVDTRAIN_CACHE to a folder that you can write to."
    )


def check_owners(folder: Path) -> None:
    """Check that only this user and the system can change the cache, and the folders above it up to the home."""
    home, above = Path(os.path.expanduser("~")), [folder, *folder.parents]
    for path in above[: above.index(home) + 1] if home in above else above:
        if path.exists():
            _refuse(owners.who_can_change(path, sticky=path != folder), folder, f"chmod go-w {shlex.quote(str(path))}")
    for used in (folder / name for name in _USED):
        inside = [Path(where, name) for where, folders, files in os.walk(used) for name in (*folders, *files)]
        for path in [used, *inside]:
            try:
                why = "" if path.is_symlink() else owners.who_can_change(path, sticky=False)
            except FileNotFoundError:  # another build's, which has just ended
                continue
            _refuse(why, folder, f"chmod -R go-w {shlex.quote(str(folder))}")


def _refuse(why: str, folder: Path, command: str) -> None:
    if "belongs to" in why:
        command = "set HVDTRAIN_CACHE to a folder of your own"
    if why:
        raise BuildError(f"{why}, and wheels in the cache {folder} are installed and run. To fix it: {command}")


def _can_be_written(folder: Path) -> bool:
    """Return whether files can be made in `folder` and below it, without making any."""
    if not folder.is_absolute():  # "~/.cache", if this user has no known home
        return False
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    below = list(folder.iterdir()) if there == folder and os.access(folder, os.R_OK) else []
    return all(os.access(path, os.W_OK | os.X_OK) for path in [there, *filter(os.path.isdir, below)])


def key_parts(found: Found, chosen: dict[str, str]) -> dict[str, str]:
    """Return everything that changes the wheel, by name."""
    parts = {
        "horovod": packages.VERSION,
        "sdist": packages.SHA256,
        "edits": changes.fingerprint(),
        "record": _CARRIED,
        "tools": " ".join(packages.BUILD_TOOLS),
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
    """Hold the key's lock: of two builds of the same wheel, the second waits and finds it in the cache."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def load(folder: Path, key: str) -> Entry | None:
    """Return the cached wheel; None if it must be built: it is missing or damaged, or its libraries are refused."""
    try:
        record = json.loads((folder / key / _RECORD).read_text(encoding="utf-8"))
        wheel = folder / key / Path(record["wheel"]).name
        if packages.sha256_of(wheel) == record["sha256"]:
            library_paths.check(wheel)
            return Entry(wheel, float(record["seconds"]))
    except (OSError, ValueError, KeyError, TypeError, BuildError):
        pass  # Missing, damaged or refused: each means that it must be built.
    return None


def store(folder: Path, key: str, wheel: Path, *, parts: dict[str, str], seconds: float) -> Entry:
    """Copy `wheel` into the cache, if its libraries look in allowed folders; the entry appears whole or not at all."""
    library_paths.check(wheel)
    with packages.filled(folder / key) as made:
        made.mkdir()
        copy = Path(shutil.copy(wheel, made))
        record = {"key": key, "wheel": wheel.name, "sha256": packages.sha256_of(copy), "seconds": round(seconds, 1)}
        (made / _RECORD).write_text(json.dumps({**record, "parts": parts}, indent=2) + "\n", encoding="utf-8")
        if (folder / key).exists():  # a rename cannot replace a folder with files
            os.rename(folder / key, made.with_name("old"))  # removed only when the new one is in place
    return Entry(folder / key / wheel.name, seconds)

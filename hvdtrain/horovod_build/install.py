"""Install the wheel into this environment."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
from pathlib import Path

from hvdtrain.horovod_build.errors import InstallError
from hvdtrain.horovod_build.pip import last_lines, pip_command

# What Horovod imports at run time. Its own requirements are hvdtrain's too, so this is for environments where
# hvdtrain came without them (pip install --no-deps).
_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging")


def install(wheel: Path, *, cache: Path) -> None:
    """Install `wheel` over whatever Horovod is there; the frameworks stay as they are.

    Raises:
        InstallError: pip failed.
    """
    missing = [name for name in _NEEDS if not _has(name)]
    commands = [["install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)]]
    if missing:
        commands.append(["install", "--quiet", *missing])
    for command in commands:
        _pip(command, cache=cache)
    importlib.invalidate_caches()


def remove(*, cache: Path) -> None:
    """Uninstall Horovod.

    Raises:
        InstallError: pip failed.
    """
    _pip(["uninstall", "--quiet", "--yes", "horovod"], cache=cache)
    importlib.invalidate_caches()


def _pip(command: list[str], *, cache: Path) -> None:
    done = subprocess.run([*pip_command(cache), *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InstallError(f"pip {' '.join(command)} failed: {last_lines(done.stderr)}")


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

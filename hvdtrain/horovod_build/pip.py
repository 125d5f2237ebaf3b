"""Install Horovod's wheel with pip: the environment's own, or one beside it where it has none, as uv's have none."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.horovod_build import owners
from hvdtrain.horovod_build.errors import BuildError
from hvdtrain.horovod_build.installed import version_of

# What uv fetches, where Python comes without a pip.
PIP, PIP_HASHES = "pip==26.3", ("f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13",)
# What Horovod imports at run time, for environments where hvdtrain came without its requirements (--no-deps).
_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging")
_OPTIONS = ("--disable-pip-version-check", "--no-input")


def install(wheel: Path, *, cache: Path) -> None:
    """Install `wheel` over whatever Horovod is there; the frameworks stay as they are."""
    _run(["install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)], cache=cache)
    if missing := [name for name in _NEEDS if not version_of(name)]:
        _run(["install", "--quiet", *missing], cache=cache)


def remove(*, cache: Path) -> None:
    """Uninstall Horovod."""
    _run(["uninstall", "--quiet", "--yes", "horovod"], cache=cache)


def _run(command: list[str], *, cache: Path) -> None:
    done = subprocess.run([*pip_command(cache), *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"pip {' '.join(command)} failed: {last_lines(done.stderr)}")
    importlib.invalidate_caches()


def pip_command(cache: Path) -> list[str]:
    """Return the command that runs pip for this environment, which does not change: its own, Python's or uv's."""
    own = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if own.returncode == 0:
        return [sys.executable, "-m", "pip", *_OPTIONS]
    # Debian has the wheels of python3-venv in another folder.
    folders = [Path(sysconfig.get_path("stdlib")) / "ensurepip" / "_bundled", sysconfig.get_config_var("WHEEL_PKG_DIR")]
    wheels = [wheel for folder in folders if folder for wheel in sorted(Path(folder).glob("pip-*.whl"))]
    if wheels:
        return [sys.executable, str(wheels[-1] / "pip"), *_OPTIONS]
    folder = cache / "build-tools" / f"cp{sys.version_info[0]}{sys.version_info[1]}-pip"
    if not (folder / "pip").is_dir():
        with owners.alone(), filled(folder) as target:
            if why := _fetch_by_uv(target):
                raise BuildError(
                    f"{sys.executable} has no pip, which fetches Horovod's source and installs the wheel, and none can "
                    f"be had: {why}. Run: {sys.executable} -m ensurepip --upgrade (or: uv pip install pip)"
                )
    return [sys.executable, str(folder / "pip"), *_OPTIONS]


def _fetch_by_uv(target: Path) -> str:
    """Put pip's package into `target`; return "" or why not."""
    uv = os.environ.get("UV") or shutil.which("uv")  # `uv run` names itself
    if not uv:
        return "this Python comes without ensurepip, and uv is not on PATH"
    pinned = target.with_name("requirements.txt")
    pinned.write_text(requirement(PIP, PIP_HASHES), encoding="utf-8")
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", str(target)]
    command += ["--require-hashes", "--requirement", str(pinned)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"uv could not fetch it: {last_lines(done.stderr)}" if done.returncode else ""


@contextmanager
def filled(final: Path) -> Iterator[Path]:
    """Yield the path of a folder or file to make, which then becomes `final`, unless another process was faster."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".partial-") as partial:
        target = Path(partial) / final.name
        yield target
        try:
            os.rename(target, final)
        except OSError:
            if not final.is_dir():
                raise


def requirement(pin: str, hashes: Iterable[str]) -> str:
    """Return a line of pip's requirements: a pinned version, and the sha256 of each file that may be taken for it."""
    return " ".join([pin, *(f"--hash=sha256:{each}" for each in hashes)]) + "\n"


def last_lines(text: str, count: int = 3) -> str:
    """Return the last lines of a program's output that say something, as one line."""
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-count:])

"""Fetch and install with pip: Horovod's published source, checked by hash, the build's tools, Horovod's wheel."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.horovod_build import owners
from hvdtrain.horovod_build.errors import BuildError
from hvdtrain.horovod_build.installed import version_of

VERSION = "0.28.1"
FILE_NAME = f"horovod-{VERSION}.tar.gz"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# The newest releases that can still build Horovod: setuptools 80 dropped what its setup.py calls, CMake 4 what its
# CMakeLists.txt need. The hashes are of wheels for any Python; CMake's for x86_64 and aarch64.
BUILD_TOOLS = ("setuptools==79.0.1", "cmake==3.31.10", "packaging==26.3")
_TOOL_HASHES = {
    "setuptools": ("e147c0549f27767ba362f9da434eab9c5dc0045d5304feb602a0af001089fc51",),
    "cmake": (
        "2f766bb46367e5e0559fa33184653754bce044583a06014dcaebf8e6dff8a1f1",
        "a4a5615f31f692c9b9aa8b365704e4b76172348af6fa40e16fea3f118bb01194",
    ),
    "packaging": ("d7193f7c8e4e93f444fde0262bf90af30e16fa0ad0ad44cb553c87339b23cd1c",),
}

# What uv fetches, where Python comes without a pip.
PIP, PIP_HASHES = "pip==26.3", ("f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13",)
# What Horovod imports at run time, for environments where hvdtrain came without its requirements (--no-deps).
_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging")
_OPTIONS = ("--disable-pip-version-check", "--no-input")


def sha256_of(path: Path) -> str:
    """Return the file's sha256 in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check(path: Path) -> Path:
    """Return `path` if it is the sdist that the patches were made for."""
    found = sha256_of(path)
    if found != SHA256:
        raise BuildError(
            f"{path} is not Horovod {VERSION}'s sdist: its sha256 is {found}, expected {SHA256}. Delete it and try "
            "again; if it is the same once more, the download was tampered with or cut short."
        )
    return path


def tool_requirements() -> str:
    """Return the build tools as pip's requirements, with the hashes of the only files that it may take."""
    return "".join(requirement(tool, _TOOL_HASHES[tool.partition("=")[0]]) for tool in BUILD_TOOLS)


def tools_folder(cache: Path) -> Path:
    """Return the folder of the build tools: another folder for other files."""
    digest = hashlib.sha256(tool_requirements().encode()).hexdigest()[:12]
    return cache / "build-tools" / f"cp{sys.version_info[0]}{sys.version_info[1]}-{digest}"


def fetch_tools(cache: Path) -> Path:
    """Return a folder with setuptools and CMake for the build only: the user's own are neither used nor changed."""
    folder = tools_folder(cache)
    if folder.is_dir():
        return folder
    with filled(folder) as target:
        options = ["install", "--only-binary", ":all:", "--target", str(target)]
        _run_pip(options, f"the build tools {' '.join(BUILD_TOOLS)}", tool_requirements(), target.parent, cache=cache)
    return folder


def fetch(cache: Path, *, tools: Path) -> Path:
    """Return the sdist, from the cache or fetched; pip checks its hash before it runs anything of it, and so do we."""
    cached = cache / "sdists" / FILE_NAME
    if cached.is_file():
        return check(cached)
    with filled(cached) as target:
        options = ["download", "--no-binary", "horovod", "--no-build-isolation", "--dest", str(target.parent)]
        pin = requirement(f"horovod=={VERSION}", [SHA256])
        _run_pip(options, f"Horovod {VERSION}'s source", pin, target.parent, cache=cache, tools=tools)
        check(target)
    return cached


def _run_pip(options: list[str], what: str, pins: str, folder: Path, *, cache: Path, tools: Path | None = None) -> None:
    """Fetch `what` by pinned requirements, which pip checks by their hashes; the sdist with `tools`."""
    file = folder / "requirements.txt"
    file.write_text(pins, encoding="utf-8")
    command = [*pip_command(cache), *options, "--quiet", "--no-deps", "--require-hashes", "--requirement", str(file)]
    # pip runs setup.py for the metadata, which needs setuptools: ours, because there is no build isolation.
    environment = {**os.environ, **({"PYTHONPATH": str(tools)} if tools else {})}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise BuildError(
            f"pip fetched files whose sha256 is not that of {what}: {last_lines(done.stderr)}. If the index is the "
            "usual one, they were tampered with, or this machine is neither x86_64 nor aarch64 with glibc"
        )
    if done.returncode != 0 or (tools and not (folder / FILE_NAME).is_file()):
        offline = f". Without a network, bring {FILE_NAME} from elsewhere and pass it with --sdist" if tools else ""
        raise BuildError(f"pip could not fetch {what}: {last_lines(done.stderr) or 'it saved no file'}{offline}")


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the checked sdist into `folder` and return the source's root."""
    with tarfile.open(check(sdist)) as archive:
        # The hash was checked; Python 3.12 warns where no filter is named.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # type: ignore[arg-type]
    return folder / f"horovod-{VERSION}"


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
            if not (target.is_dir() and final.is_dir()):  # a file cannot take a folder's place
                raise


def requirement(pin: str, hashes: Iterable[str]) -> str:
    """Return a line of pip's requirements: a pinned version, and the sha256 of each file that may be taken for it."""
    return " ".join([pin, *(f"--hash=sha256:{each}" for each in hashes)]) + "\n"


def last_lines(text: str, count: int = 3) -> str:
    """Return the last lines of a program's output that say something, as one line."""
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-count:])

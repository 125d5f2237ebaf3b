"""The packages for `pip install`: an sdist that holds everything, a wheel that works, and the command to type next."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("hatchling", reason="needs hatchling: make setup")

ROOT = Path(__file__).resolve().parents[3]


def build(source: Path, target: Path, *options: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target), *options]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warn" not in (done.stdout + done.stderr).lower()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


def unpacked(dist: Path, target: Path) -> Path:
    (sdist,) = dist.glob("*.tar.gz")
    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 and newer
    with tarfile.open(sdist) as archive:
        archive.extractall(target, **safely)
    (root,) = target.iterdir()
    return root


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="only a clone knows what is tracked"
)
def test_the_sdist_holds_what_git_knows_and_nothing_else(dist: Path, tmp_path: Path) -> None:
    root = unpacked(dist, tmp_path)
    # New files that are not added yet count as known: nobody wants to commit before a test.
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    known = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    held = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}
    assert held == {name for name in known if name and (ROOT / name).exists()} | {"PKG-INFO"}


def test_a_package_index_would_take_both_files(dist: Path) -> None:
    pytest.importorskip("twine", reason="needs twine: make setup")
    files = [str(path) for path in dist.iterdir()]
    assert len(files) == 2
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("PASSED")) == (0, 2), done.stdout + done.stderr


def test_the_changelog_tells_of_the_version_that_is_packed(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    version = sdist.name.removeprefix("hvdtrain-").removesuffix(".tar.gz")
    newest = re.search(r"^## \[(.+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == version


def test_the_sdist_makes_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    root = unpacked(dist, tmp_path / "source")
    build(root, tmp_path / "again", "-t", "wheel")
    (wheel,), (again,) = dist.glob("*.whl"), (tmp_path / "again").glob("*.whl")
    assert contents(again) == contents(wheel)


def test_the_wheel_is_typed_and_holds_the_package_alone(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    found = contents(wheel)
    assert "hvdtrain/py.typed" in found
    changes = ROOT / "hvdtrain/horovod_build"
    files = [path for folder in ("patches", "added", "replaced") for path in (changes / folder).rglob("*.*")]
    assert {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"} <= found.keys()
    assert {name.split("/")[0].partition("-")[0] for name in found} == {"hvdtrain"}
    assert not [name for name in found if "__pycache__" in name or "/test" in name]
    (metadata,) = (text for name, text in found.items() if name.endswith("/METADATA"))
    extras = Parser().parsestr(metadata.decode()).get_all("Provides-Extra")
    assert extras is not None
    assert {"torch", "tensorflow", "jax", "jax-cuda", "keras", "report"} <= set(extras)


@pytest.fixture(scope="module")
def hvdtrain(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what runs the command of an environment that has the wheel, what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True, timeout=100)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    metadata = next(text for name, text in contents(wheel).items() if name.endswith("/METADATA"))
    lend_requirements(Parser().parsestr(metadata.decode()).get_all("Requires-Dist") or [], site)
    (folder / "train.py").touch()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HVDTRAIN"))}
        return subprocess.run(
            [str(python.with_name("hvdtrain")), *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


def lend_requirements(requirements: list[str], site: Path) -> None:
    """Link what is required, and what that requires, from this environment: nothing is fetched."""
    asked, done = list(requirements), set()
    while asked:
        requirement = Requirement(asked.pop())
        if requirement.name in done or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        done.add(requirement.name)
        found = importlib.metadata.distribution(requirement.name)
        tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
        asked += found.requires or []


def test_where_nothing_is_installed_doctor_tells_the_next_step(hvdtrain: Callable[..., object]) -> None:
    done = hvdtrain("doctor")
    assert isinstance(done, subprocess.CompletedProcess)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    next_step = "pip install 'torch>=2.11,<2.16' && hvdtrain build"
    assert done.stdout.endswith(f"Training would not work. Type next:\n  {next_step}\n")


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        (
            "run -np 2 train.py",
            2,
            "hvdtrain run: Horovod is not installed, so no ranks can be started. Run `pip",
        ),
        ("bench --quick", 2, "hvdtrain bench: Horovod is not installed, so no ranks can be started. Run `pip"),
        ("build --dry-run", 1, "hvdtrain build: "),
        ("report gone", 2, "hvdtrain report: there is no folder gone"),
    ],
)
def test_where_nothing_is_installed_every_command_says_so_in_one_line(
    hvdtrain: Callable[..., subprocess.CompletedProcess[str]], line: str, status: int, said: str
) -> None:
    done = hvdtrain(*line.split())
    assert (done.returncode, done.stderr.count("\n")) == (status, 1), done.stderr
    assert done.stderr.startswith(said)


def test_bash_completes_what_the_installed_command_takes(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    script = (
        'eval "$(_HVDTRAIN_COMPLETE=source_bash hvdtrain)"\n'
        "COMP_WORDS=(hvdtrain plan --meas) COMP_CWORD=2\n"
        "_hvdtrain_completion hvdtrain\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [bash, "-c", script], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("--measured\n", "")

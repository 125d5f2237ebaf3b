"""`hvdtrain build` as a person types it, in an environment without Horovod and pip that sees this one's frameworks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from hvdtrain.horovod_build.find import find_frameworks

# With the wheel in the cache, as after `make setup`, this takes half a minute; without it, a compile comes first.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment that has links to all of this one's packages but Horovod and, as with uv, pip."""
    return make_environment(tmp_path_factory.mktemp("environment"))


def make_environment(folder: Path) -> Path:
    venv.create(folder, symlinks=True)
    (own,) = folder.glob("lib/python*/site-packages")
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if not package.name.startswith(("horovod", "pip")):
            (own / package.name).symlink_to(package)
    return folder


def hvdtrain(environment: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(environment / "bin" / "python"), "-m", "hvdtrain.cli", *arguments]
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=env)


def test_build_installs_horovod_and_proves_every_framework_over_every_data_plane(environment: Path) -> None:
    plan = hvdtrain(environment, "build", "--dry-run")
    assert plan.returncode == 0, plan.stderr
    (planes,) = [line.split(":")[1].split(",") for line in plan.stdout.splitlines() if "data planes:" in line]
    assert not list(environment.glob("lib/python*/site-packages/horovod"))

    done = hvdtrain(environment, "build")
    assert done.returncode == 0, done.stdout + done.stderr
    for framework in find_frameworks():
        for plane in (plane.strip() for plane in planes):
            proven = rf"{framework.name} over {plane}, \d process.*: [\d.]+ ms"
            without_gpu = rf"|{framework.name} over nccl: not tried" if plane == "nccl" else ""
            assert re.search(proven + without_gpu, done.stdout), done.stdout
    (metadata,) = environment.glob("lib/python*/site-packages/horovod/metadata.json")
    record = json.loads(metadata.read_text())
    assert set(record["hvdtrain"]["data_planes"].split(",")) == {plane.strip() for plane in planes}

    again = hvdtrain(environment, "build", "--no-install")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Taking the wheel from the cache" in again.stdout


def test_the_wheel_of_one_host_serves_another_which_says_what_it_lacks(environment: Path, tmp_path: Path) -> None:
    done = hvdtrain(environment, "build", "--no-install", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    (typed,) = re.findall(r"pip install (.*) && hvdtrain doctor$", done.stdout, re.MULTILINE)
    other = make_environment(tmp_path / "other")
    pip = [sys.executable, "-m", "pip", "--python", str(other / "bin" / "python"), "install", "-q", "--no-index"]
    subprocess.run([*pip, *shlex.split(typed)], check=True, timeout=100)
    doctor = hvdtrain(other, "doctor", "--no-allreduce")
    assert "What is installed fits together" in doctor.stdout, doctor.stdout + doctor.stderr

    (metadata,) = other.glob("lib/python*/site-packages/horovod/metadata.json")
    record = json.loads(metadata.read_text())
    record["hvdtrain"]["cpu"] += " amx9"
    metadata.write_text(json.dumps(record))
    doctor = hvdtrain(other, "doctor")
    assert doctor.returncode == 1
    assert "built for CPUs with amx9, which this host's CPU lacks" in doctor.stdout
    assert doctor.stdout.endswith("Training would not work. Type next:\n  hvdtrain build\n")


def test_plain_horovodrun_works_after_build(environment: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "import horovod.torch as hvd\n"
        "hvd.init()\n"
        "total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()\n"
        # One write a rank: mpirun interleaves smaller ones.
        "sys.stdout.write(f'rank {hvd.rank()} of {hvd.size()}: {total}\\n')\n"
    )
    done = subprocess.run(
        ["horovodrun", "-np", "2", "python", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": "/dev/null",  # as users that nobody logs in as have it
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2: 2.0" in done.stdout


def test_where_the_home_cannot_be_written_the_build_says_where_the_cache_is(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HVDTRAIN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    done = hvdtrain(environment, "build", "--dry-run", HOME="/dev/null")
    assert done.returncode == 0, done.stderr
    cache = environment / ".cache" / "hvdtrain"
    assert f"/dev/null/.cache/hvdtrain cannot be written: the cache is in {cache}\n" in done.stdout
    assert not cache.exists()


def test_a_missing_compiler_ends_the_build_with_one_sentence(environment: Path, tmp_path: Path) -> None:
    done = hvdtrain(environment, "build", PATH=str(tmp_path), CXX="")
    assert done.returncode == 1
    assert done.stderr.startswith("hvdtrain build: No C++ compiler")
    assert "Traceback" not in done.stderr


def test_another_sdist_is_refused_by_its_hash(environment: Path, tmp_path: Path) -> None:
    other = tmp_path / "horovod-0.28.1.tar.gz"
    other.write_bytes(b"not Horovod")
    done = hvdtrain(environment, "build", "--rebuild", "--sdist", str(other))
    assert done.returncode == 1
    assert "is not Horovod 0.28.1's sdist: its sha256 is" in done.stderr

"""`make gpu`'s script: what it carries for each Python, and what it says where it cannot go on."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from hvdtrain.horovod_build import packages


@pytest.fixture
def gpu(load_script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    script = load_script("../scripts/gpu.py")
    monkeypatch.setattr(script, "SDIST", tmp_path / script.SDIST.name)
    monkeypatch.setattr(script, "BUILT", tmp_path / "built")
    return script


@pytest.mark.parametrize(("python", "keras"), [("3.10", "keras==3.12.4"), ("3.11", "keras==3.15.1")])
def test_each_python_gets_its_own_pins_and_no_numpy(gpu: ModuleType, python: str, keras: str) -> None:
    whole, alone = gpu.requirements(python)
    assert keras in alone
    assert {"typer", "psutil", "pytest", "rich"} <= {each.partition(">")[0].partition("=")[0] for each in whole}
    assert not any(each.startswith("numpy") for each in whole + alone)


def test_what_is_carried_is_what_hvdtrain_build_asks_for(gpu: ModuleType) -> None:
    carried = [line.split()[0] for line in gpu.tools().splitlines()]
    assert set(packages.BUILD_TOOLS) < set(carried)
    assert "--hash=sha256:" in gpu.tools()
    assert gpu.SDIST.name == packages.FILE_NAME


def test_programs_that_the_build_does_not_start_are_left_out_of_a_wheel(gpu: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "cmake-3-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("bin/cmake", "kept")
        archive.writestr("bin/ctest", "not")
    gpu._leave_out(wheel, ("bin/ctest",))
    with zipfile.ZipFile(wheel) as archive:
        assert archive.namelist() == ["bin/cmake"]
    assert list(tmp_path.glob("*.smaller")) == []


def test_without_what_is_carried_one_line_says_how_to_get_it(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "build"])
    assert gpu.main() == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "`make gpu-carry`" in error


def test_a_python_without_a_cuda_torch_is_named(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.SDIST.write_text("")
    monkeypatch.setattr(gpu, "PYTHONS", (f"3.{sys.version_info[1]}",))
    monkeypatch.setattr(gpu, "base", lambda code: '["2.13.0+cpu", null]')
    monkeypatch.setattr(sys, "argv", ["gpu.py", "build"])
    assert gpu.main() == 1
    assert 'needs NumPy and a CUDA build of torch. Received: ["2.13.0+cpu", null]' in capsys.readouterr().err


def test_tests_and_benchmarks_want_a_gpu(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "shown", list)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "test"])
    assert gpu.main() == 1
    assert "no GPU: nvidia-smi shows none" in capsys.readouterr().err

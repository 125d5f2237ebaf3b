"""What the README and the first page say that a command prints is what it prints."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# What horovodrun puts before a rank's line.
LAUNCHER = re.compile(r"^\[(?:\d+,)?\d+\]<std(?:out|err)>:", re.MULTILINE)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None, reason="needs Horovod: install it with hvdtrain build"
    ),
]


def output_of(command: str, folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.run(
        command.split(), cwd=folder, env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, timeout=240,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-4000:]
    return LAUNCHER.sub("", process.stdout)


def test_one_process_and_two_ranks_print_the_lines_that_the_readme_shows(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(# train_torch\.py\n.*?)```", text, re.DOTALL)
    shown = re.search(r"```text\n(\$ .*?)```", text, re.DOTALL)
    assert script
    assert shown
    (tmp_path / "train_torch.py").write_text(script.group(1), encoding="utf-8")
    commands = re.findall(r"^\$ (.+)\n(.+)$", shown.group(1), re.MULTILINE)
    assert [command for command, _ in commands] == ["python train_torch.py", "horovodrun -np 2 python train_torch.py"]
    assert len({line for _, line in commands}) == 1, "the README says that they are equal"
    for command, line in commands:
        assert f"\n{line} " in output_of(command, tmp_path)


def test_the_first_page_shows_what_its_script_prints(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "pages" / "start.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(# start\.py\n.*?)```", text, re.DOTALL)
    shown = re.search(r"```text\n(ranks 1: .*)\n(ranks 2: .*)\n```", text)
    assert script
    assert shown
    (tmp_path / "start.py").write_text(script.group(1), encoding="utf-8")
    assert shown.group(1) in output_of("python start.py 64", tmp_path)
    assert shown.group(2) in output_of("horovodrun -np 2 python start.py 32", tmp_path)

"""The runner of README.md's code blocks, on sample markdown; and which of README.md's own blocks it leaves out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


# What README.md's blocks leave out in CI, in order: nothing else may be skipped unseen.
README_SKIPS = [
    "ci: .ci/run runs it as its first step",
    "docker: needs a Docker engine",
    "docker: needs a Docker engine and GPUs",
    "multi-host: needs several hosts",
    "multi-host: needs several hosts",
]


@pytest.fixture(scope="module")
def runner(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("readme/run_blocks.py")


@pytest.fixture
def small_tree(tmp_path: Path, runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "here.txt").write_text("project file\n")
    monkeypatch.setattr(runner, "ROOT", tree)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    return tree


Run = Callable[[str], tuple[int, list[str]]]


@pytest.fixture
def run(tmp_path: Path, small_tree: Path, runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> Run:
    def run_text(text: str) -> tuple[int, list[str]]:
        readme = tmp_path / "README.md"
        readme.write_text(text)
        status = runner.main([str(readme)])
        return status, capsys.readouterr().out.rstrip().splitlines()

    return run_text


def test_blocks_are_read_with_their_lines_and_languages(runner: ModuleType) -> None:
    blocks = runner.read("# Title\n\n```bash\nls\n```\ntext\n  ```python title\n  x = 1\n  ```\n~~~text\n```\n~~~\n")
    assert [(block.line, block.language, block.text) for block in blocks] == [
        (3, "bash", "ls\n"),
        (7, "python", "x = 1\n"),
        (10, "text", "```\n"),
    ]


def test_blocks_run_in_order_in_one_copy_of_the_tree(run: Run, small_tree: Path) -> None:
    text = "```bash\ncat here.txt > made.txt\n```\n```python\nassert 'project' in open('made.txt').read()\n```\n"
    status, lines = run(text)
    assert status == 0, lines
    assert lines[-1] == "2 passed, 0 failed"
    assert not (small_tree / "made.txt").exists()


def test_named_python_block_is_there_for_later_blocks(run: Run) -> None:
    text = "```python\n# train.py\nprint('trained')\n```\n```bash\npython train.py | grep trained\n```\n"
    assert run(text)[1][-1] == "2 passed, 0 failed"


@pytest.mark.parametrize(
    "block",
    ["bash\nfalse\ntrue", "bash\nfalse | true", "bash\necho $unset_name", "python\nraise ValueError('shown')"],
)
def test_any_failing_line_fails_the_run(run: Run, block: str) -> None:
    status, lines = run(f"```{block}\n```\n```bash\ntrue\n```\n")
    assert status == 1
    assert lines[-1] == "1 passed, 1 failed"


def test_failure_shows_the_end_of_the_output(run: Run) -> None:
    lines = run("```python\nraise ValueError('shown')\n```\n")[1]
    assert any("ValueError: shown" in line for line in lines)


def test_block_that_does_not_end_is_ended_with_its_children(run: Run) -> None:
    started = time.monotonic()
    status, lines = run("<!-- ci: limit 1 -->\n```bash\nsleep 300 & sleep 300\n```\n")
    assert status == 1
    assert "no end within 1 s" in "\n".join(lines)
    assert time.monotonic() - started < 20


def test_skipped_block_is_named_with_its_reason(run: Run) -> None:
    text = "<!-- ci: skip, gpu: needs two -->\n```bash\nfalse\n```\n```bash\ntrue\n```\n"
    status, lines = run(text)
    assert status == 0
    assert lines[0] == "README.md:2 bash: skipped, gpu: needs two"


def test_nothing_run_is_a_failure(run: Run) -> None:
    status, lines = run("# No blocks\n```text\nls\n```\n")
    assert status == 1
    assert lines[-1] == "0 passed, 1 failed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\nls\n```\n", "needs a language"),
        ("```bash\nls\n", "no end"),
        ("<!-- ci: skip -->\n```bash\nls\n```\n", "expected"),
        ("<!-- ci: skip, slow: takes long -->\n```bash\nls\n```\n", "expected"),
        ("<!-- ci: limit 5 -->\n\n```bash\nls\n```\n", "right above"),
        ("<!-- ci: limit 5 -->\n", "right above"),
    ],
)
def test_unclear_readme_is_an_error(run: Run, text: str, message: str) -> None:
    status, lines = run(text)
    assert status == 1
    assert message in lines[0]


def test_missing_readme_is_an_error(tmp_path: Path, runner: ModuleType) -> None:
    assert runner.main([str(tmp_path / "none.md")]) == 1


def test_readme_leaves_out_only_what_this_file_names(runner: ModuleType) -> None:
    blocks = runner.read((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [block.skip for block in blocks if block.skip and block.language in runner.RUN] == README_SKIPS

"""The runner of code blocks, on sample markdown; and which blocks of README.md and the pages it leaves out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent


# What is left out in CI, by document, in order: nothing else may be skipped unseen.
README_SKIPS = [
    "ci: .ci/run runs it",
    "ci: tests/e2e/horovod_build and tests/e2e/project/test_package.py do it",
]
PAGE_SKIPS = {
    "install.md": [
        "ci: .ci/run makes the environment in its first step",
        "ci: tests/e2e/horovod_build/test_build.py builds such a wheel and installs it in another environment",
        "gpu: downloads gigabytes",
        "docker: tests/docker/test_images.py runs what it says",
        "docker: needs a Docker engine and GPUs",
        "docker: needs Apptainer",
        "docker: tests/docker/test_images.py runs it for two hosts",
        "docker: tests/docker/test_images.py runs it for two hosts, without GPUs",
        "docker: tests/docker/test_images.py runs it for two hosts, without GPUs",
    ],
    "large-models.md": ["ci: tests/ranks/torch/test_grid_trainer.py trains such a model"] * 4,
    "hugging-face.md": ["ci: make models runs it where transformers is installed"],
    "lightning.md": ["ci: make models runs it where lightning is installed"],
    "libraries.md": ["ci: make models runs tests/ranks/models/test_ignite.py where ignite is installed"],
    "transformers-trainer.md": ["ci: make models runs it where transformers is installed"],
    "data.md": ["ci: tests/engines/test_parquet.py runs it where pyarrow is installed"],
    "spark.md": ["ci: tests/engines/test_spark.py runs it where PySpark is installed"] * 2,
    "start.md": ["ci: .ci/run makes the environment in its first step"],
    "horovodrun.md": [
        "multi-host: needs several hosts; tests/engines/test_hosts.py runs it on three",
        "multi-host: needs several hosts",
    ],
    "kubernetes.md": ["multi-host: needs a Kubernetes cluster"] * 3,
    "mpirun.md": ["multi-host: needs several hosts"],
    "ray.md": [
        "ci: tests/engines/test_ray.py runs it where Ray is installed",
        "multi-host: needs a Ray cluster",
    ],
    "slurm.md": [
        "multi-host: needs a Slurm cluster; tests/engines/test_slurm.py submits this script to one",
        "multi-host: needs a Slurm cluster",
    ],
}


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


def test_file_is_saved_for_the_block_that_runs_it(run: Run) -> None:
    text = "<!-- ci: file -->\n```python\n# once.py\nopen('log', 'a').write('x')\n```\n```bash\npython once.py\n"
    status, lines = run(f"{text}test $(cat log) = x\n```\n")
    assert status == 0, lines
    assert lines[0] == "README.md:2 python: saved as once.py"
    assert lines[-1] == "1 passed, 0 failed"


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
        ("<!-- ci: file -->\n```python\n# alone.py\n```\n", "that runs it"),
        ("<!-- ci: file -->\n```python\nx = 1\n```\n```bash\npython alone.py\n```\n", "that runs it"),
    ],
)
def test_unclear_document_is_an_error(run: Run, text: str, message: str) -> None:
    status, lines = run(text)
    assert status == 1
    assert message in lines[0]


def test_missing_document_is_an_error(tmp_path: Path, runner: ModuleType) -> None:
    assert runner.main([str(tmp_path / "none.md")]) == 1


def test_several_documents_run_in_one_go_and_are_told_apart(
    tmp_path: Path, small_tree: Path, runner: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.md").write_text("```bash\ncat here.txt\n```\n")
    (tmp_path / "two.md").write_text("\n```bash\nfalse\n```\n")
    assert runner.main([str(tmp_path / "one.md"), str(tmp_path / "two.md")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("one.md:1 bash: ok")
    assert lines[1].startswith("two.md:2 bash: FAILED")
    assert lines[-1] == "1 passed, 1 failed"


def test_without_a_document_the_readme_and_every_page_are_run(
    small_tree: Path, runner: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_tree / "README.md").write_text("```bash\ntrue\n```\n")
    pages = small_tree / "docs" / "pages" / "reference"
    pages.mkdir(parents=True)
    (pages / "names.md").write_text("```python\nopen('here.txt')\n```\n")
    (pages.parent / "start.md").write_text("```bash\ntrue\n```\n")
    assert runner.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "README.md:1 bash",
        "docs/pages/reference/names.md:1 python",
        "docs/pages/start.md:1 bash",
    ]


def test_a_line_without_its_one_document_is_refused(runner: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["--only", "3"])
    assert "--only needs the one document" in capsys.readouterr().err


def skips(runner: ModuleType, path: Path) -> list[str]:
    blocks = runner.read(path.read_text(encoding="utf-8"))
    return [block.skip for block in blocks if block.skip and block.language in runner.RUN]


def test_documents_leave_out_only_what_this_file_names(runner: ModuleType) -> None:
    readme, *pages = runner.documents()
    assert skips(runner, readme) == README_SKIPS
    assert {page.name: found for page in pages if (found := skips(runner, page))} == PAGE_SKIPS

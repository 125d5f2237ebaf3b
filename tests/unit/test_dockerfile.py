"""The Dockerfile's promises that can be read off it, and the reader that tests/docker/run_steps.py runs it with."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def reader(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("docker/dockerfile.py")


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_image_has_a_user_a_health_check_and_a_builder_of_its_own(reader: ModuleType, target: str) -> None:
    parsed = reader.read(ROOT / "Dockerfile")
    builder, stage = parsed.needed_for(target)
    assert (builder.name, stage.name) == (f"{target}-builder", target)
    assert any("hvdtrain build" in step.text for step in builder.steps)
    users = [step.text for step in stage.steps if step.keyword == "USER"]
    assert users == ["hvdtrain"]
    health = stage.settings["HEALTHCHECK"].text.removeprefix("CMD").strip()
    assert reader.words(health) == ["hvdtrain", "doctor"]


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_runtime_stage_installs_no_build_tools(reader: ModuleType, target: str) -> None:
    stage = reader.read(ROOT / "Dockerfile").stages[target]
    installed = " ".join(step.text for step in stage.steps if step.keyword == "RUN").split()
    assert not {"g++", "gcc", "make", "cmake", "build-essential", "libopenmpi-dev", "python3-dev"} & set(installed)
    assert {"openmpi-bin", "openssh-server", "openssh-client", "--no-install-recommends"} <= set(installed)


def test_everything_copied_is_let_into_the_build_context(reader: ModuleType) -> None:
    allowed = [line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")]
    for stage in reader.read(ROOT / "Dockerfile").stages.values():
        for step in stage.steps:
            if step.keyword == "COPY" and not step.options:
                for source in step.text.split()[:-1]:
                    assert source.split("/")[0] in allowed, f"line {step.line}: {source}"


def test_no_package_source_is_named_so_that_the_users_own_configuration_decides() -> None:
    for path in (ROOT / "Dockerfile", *(ROOT / "tests" / "docker").glob("*.py")):
        assert not re.search(r"https?://|index-url", path.read_text(encoding="utf-8")), path


def test_lines_are_joined_and_comments_dropped(reader: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(
        "ARG BASE=debian\n# note\nFROM ${BASE}:12 AS one\nRUN --mount=type=cache,target=/c a \\\n# why\n  b\n"
    )
    stage = reader.read(path).stages["one"]
    assert stage.base == "debian:12"
    (step,) = stage.steps
    assert (step.options, step.text.split(), step.line) == (("--mount=type=cache,target=/c",), ["a", "b"], 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM a AS b\nONBUILD RUN x\n", "line 2: ONBUILD"),
        ("RUN x\n", "line 1: RUN"),
        ("FROM a\n", "expected FROM image AS name"),
        ("FROM ${NONE} AS b\n", "NONE is not set"),
        ("FROM a AS b\nRUN x \\\n", "ends with a backslash"),
    ],
)
def test_what_the_reader_does_not_know_is_an_error(reader: ModuleType, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        reader.read(path)


def test_env_without_an_equals_sign_is_an_error(reader: ModuleType) -> None:
    assert reader.assignments("A=1 B='two words'") == {"A": "1", "B": "two words"}
    with pytest.raises(ValueError, match="NAME=value"):
        reader.assignments("A 1")

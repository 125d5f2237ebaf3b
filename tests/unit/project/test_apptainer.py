"""The Apptainer definition has the steps of the Dockerfile's cpu image."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
DEFINITION = (ROOT / "docker" / "hvdtrain.def").read_text(encoding="utf-8").replace("\\\n", " ")
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL))
RECIPES = dict(re.findall(r"^Stage: (\S+)\n(.*?)(?=^Bootstrap|\Z)", DEFINITION, re.MULTILINE | re.DOTALL))
PAIRS = {"cpu-builder": "builder", "cpu": "run"}


def section(recipe: str, name: str) -> str:
    (found,) = re.findall(rf"^%{name}\n(.*?)(?=^%|\Z)", recipe, re.MULTILINE | re.DOTALL)
    return str(found)


def packages(text: str) -> set[str]:
    (names,) = re.findall(r"apt-get install -y --no-install-recommends ([^&\n]*)", text)
    return set(names.split())


def steps(text: str) -> list[str]:
    """Return what is run after the packages, without what only Docker's layers need."""
    commands = " && ".join(re.findall(r"^(?:RUN|    ) *(.*)$", text, re.MULTILINE))
    commands = re.sub(r"--mount=\S+|echo '__version__ = \"0\"' > \S+", "", commands).replace(
        "{{ EXTRAS }}", "${EXTRAS}"
    )
    words = (" ".join(each.split()).strip("{}; ") for each in commands.split("&&"))
    return [each for each in words if re.match(r"python3 -m venv|HVDTRAIN_GPU|pip |hvdtrain |rm -r /opt", each)]


@pytest.mark.parametrize("stage", PAIRS)
def test_both_images_have_the_same_packages(stage: str) -> None:
    assert packages(RECIPES[PAIRS[stage]]) == packages(STAGES[stage])


def test_both_images_take_the_same_steps() -> None:
    ours = steps(section(RECIPES["builder"], "post"))
    assert ours == steps(STAGES["cpu-builder"])
    assert [each.split()[0] for each in ours] == ["python3", "HVDTRAIN_GPU=0", "pip", "rm", "pip", "hvdtrain"]


def test_both_images_have_the_same_extras_and_base() -> None:
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", STAGES["cpu-builder"], re.MULTILINE)
    (base,) = re.findall(r"^ARG DEBIAN_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"EXTRAS=(\S+)", section(RECIPES["builder"], "arguments")) == [extras]
    assert re.findall(r"DEBIAN_IMAGE=(\S+)", DEFINITION) == [base] * 2
    assert re.findall(r"^From: (.*)$", DEFINITION, re.MULTILINE) == ["{{ DEBIAN_IMAGE }}"] * 2


def test_ranks_have_the_same_environment_in_both_images() -> None:
    (variables,) = re.findall(r"^ENV (.*)$", STAGES["cpu"], re.MULTILINE)
    assert re.findall(r"export (\S+)", section(RECIPES["run"], "environment")) == variables.split()


def test_both_images_hold_the_same_files() -> None:
    def copied(stage: str) -> set[str]:
        lines = re.findall(r"^COPY (?!--from)(.*) \S+$", STAGES[stage], re.MULTILINE)
        return {name for line in lines for name in line.split()}

    for stage, name in PAIRS.items():
        files = section(RECIPES[name], "files")
        ours = {word for line in files.splitlines() for word in line.split()[:-1]}
        assert {name for name in copied(stage) if not name.startswith("hvdtrain/")} == ours
    assert "/opt/hvdtrain /opt/hvdtrain" in RECIPES["run"]
    assert re.findall(r"^COPY --from=cpu-builder (.*)$", STAGES["cpu"], re.MULTILINE) == ["/opt/hvdtrain /opt/hvdtrain"]


def test_the_default_command_is_the_same() -> None:
    assert "set -- hvdtrain doctor;" in section(RECIPES["run"], "runscript")

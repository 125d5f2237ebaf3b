"""Read a Dockerfile into stages; an instruction that this reader does not know is an error, not a silent skip."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

STEPS = ("RUN", "COPY", "ENV", "WORKDIR", "USER", "ARG")
SETTINGS = ("CMD", "EXPOSE", "HEALTHCHECK")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its keyword, its --options and the rest of the line, continuation lines joined."""

    keyword: str
    options: tuple[str, ...]
    text: str
    line: int


@dataclass
class Stage:
    """One FROM with what follows it."""

    name: str
    base: str
    steps: list[Instruction] = field(default_factory=list)
    settings: dict[str, Instruction] = field(default_factory=dict)


@dataclass
class Dockerfile:
    """All stages, and the ARGs in front of the first."""

    arguments: dict[str, str]
    stages: dict[str, Stage]

    def needed_for(self, target: str) -> list[Stage]:
        """Return the stages that `target` is built from, in order, itself last."""
        needed = {target}
        for name in reversed(self.stages):
            if name in needed:
                stage = self.stages[name]
                needed.add(stage.base)
                needed |= {
                    option.removeprefix("--from=")
                    for step in stage.steps
                    for option in step.options
                    if option.startswith("--from=")
                }
        return [stage for name, stage in self.stages.items() if name in needed]


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace $NAME and ${NAME}; an unknown name is an error, since Docker would put nothing there."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name not in variables:
            raise ValueError(f"${name} is not set in: {text}")
        return variables[name]

    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)


def assignments(text: str) -> dict[str, str]:
    """Read the NAME=value pairs of ENV and ARG."""
    pairs = [word.partition("=") for word in shlex.split(text)]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(f"expected NAME=value pairs. Received: {text}")
    return {name: value for name, _, value in pairs}


def words(text: str) -> list[str]:
    """Read the exec form, ["a", "b"], of CMD."""
    parsed = json.loads(text)
    if not isinstance(parsed, list) or not all(isinstance(word, str) for word in parsed):
        raise ValueError(f"expected a JSON list of strings. Received: {text}")
    return parsed


def _instructions(text: str) -> list[Instruction]:
    found = []
    pending = ""
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        first = first or number
        pending += line.rstrip()
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        keyword, _, rest = pending.strip().partition(" ")
        options = []
        rest = rest.strip()
        while rest.startswith("--"):
            option, _, rest = rest.partition(" ")
            options.append(option)
            rest = rest.strip()
        found.append(Instruction(keyword.upper(), tuple(options), rest, first))
        pending, first = "", 0
    if pending:
        raise ValueError(f"line {first}: the last line ends with a backslash")
    return found


def read(path: Path) -> Dockerfile:
    """Read the Dockerfile at `path`.

    Raises:
        ValueError: an instruction that the steps' runner does not know, with its line.
    """
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for instruction in _instructions(path.read_text(encoding="utf-8")):
        if instruction.keyword == "FROM":
            match = re.fullmatch(r"(\S+) AS (\S+)", instruction.text)
            if match is None:
                raise ValueError(f"line {instruction.line}: expected FROM image AS name. Received: {instruction.text}")
            stage = stages[match.group(2)] = Stage(match.group(2), expand(match.group(1), arguments))
        elif stage is None and instruction.keyword == "ARG":
            arguments |= assignments(instruction.text)
        elif stage is not None and instruction.keyword in STEPS:
            stage.steps.append(instruction)
        elif stage is not None and instruction.keyword in SETTINGS:
            stage.settings[instruction.keyword] = instruction
        else:
            raise ValueError(f"line {instruction.line}: {instruction.keyword} is not known to this reader")
    return Dockerfile(arguments, stages)

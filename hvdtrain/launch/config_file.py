"""The file of `hvdtrain run --config`, and what it and the command line come to together.

    np: 4
    hosts: host1:2,host2:2
    max-restarts: 3
    grace: 30
    launcher: horovodrun
    launcher-options: [--network-interfaces, eth0]
    environment:
      OMP_NUM_THREADS: 1
    script: train.py
    arguments: [--epochs, 90]

A key is an option without its dashes; every one may be left out. What is on the command line wins. Values are taken as
they are written, and go through the same checks as options do.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.errors import UsageError
from hvdtrain.launch import arguments
from hvdtrain.launch.arguments import HOROVODRUN, HOROVODRUN_OPTIONS, MPIRUN
from hvdtrain.system import private_files, redact
from hvdtrain.system.suggestions import nearest

_FILE = "run.yaml"
_SCALARS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp"))
# Options of which the last one holds, whatever they are called; of the others each name is its own.
_HOSTS = ("-H", "--hosts", "-host", "--host")
_SAME = (
    frozenset({*_HOSTS, "-hostfile", "--hostfile", "-machinefile", "--machinefile", "--host-discovery-script"}),
    frozenset({"--gloo", "--mpi", "--jsrun"}),
)
# Options of mpirun that may be repeated with another first value: -x A=1 -x B=2.
_REPEATED = frozenset({"x", "mca", "gmca", "gpmixmca", "pmixmca"})


@dataclass(frozen=True)
class Settings:
    """What a run is: from a file, from the command line, or from both. None where nothing was said."""

    ranks: str | None = None
    max_restarts: str | None = None
    grace: str | None = None
    launcher: str | None = None
    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    program: list[str] = field(default_factory=list)

    def over(self, other: Settings) -> Settings:
        """Return these settings, and the other ones where these say nothing."""
        launcher = self.launcher or other.launcher
        mine = list(arguments.options(self.options, launcher or HOROVODRUN))
        said = {_meaning(name, words) for name, words in mine}
        theirs = arguments.options(other.options, launcher or HOROVODRUN)
        kept = [word for name, words in theirs if _meaning(name, words) not in said for word in words]
        # After --, options alone: more arguments for the file's script.
        more = bool(self.program) and self.program[0].startswith("-")
        return Settings(
            ranks=self.ranks or other.ranks,
            max_restarts=self.max_restarts or other.max_restarts,
            grace=self.grace or other.grace,
            launcher=launcher,
            options=[*kept, *self.options],
            environment={**other.environment, **self.environment},
            program=[*other.program, *self.program] if more else self.program or other.program,
        )

    def document(self) -> dict[str, Any]:
        """Return them as the file has them, with the values of secrets hidden."""
        hosts, options = _take_hosts(self.options, self.launcher or HOROVODRUN)
        program = redact.words(self.program)
        whole = {
            "np": self.ranks and int(self.ranks),
            "hosts": hosts,
            "max-restarts": self.max_restarts and int(self.max_restarts),
            "grace": self.grace and _plain(self.grace),
            "launcher": self.launcher,
            "launcher-options": redact.words(options),  # -x TOKEN=...
            "environment": redact.variables(self.environment),
            "script": program[0] if program else None,
            "arguments": program[1:],
        }
        return {key: value for key, value in whole.items() if value not in (None, [], {})}

    def __str__(self) -> str:
        shown = []
        for key, value in self.document().items():
            words = [f"{name}={text}" for name, text in value.items()] if isinstance(value, dict) else value
            shown.append(f"{key} {shlex.join(words) if isinstance(words, list) else words}")
        return ", ".join(shown)


DEFAULTS = Settings(max_restarts="3", grace="30", launcher=HOROVODRUN)


def _plain(text: str) -> int | float:
    """Return a number as people write it: 30, not 30.0."""
    return int(float(text)) if float(text).is_integer() else float(text)


def _meaning(name: str, words: Sequence[str]) -> str | frozenset[str]:
    """Return what an option is about: of two that are about the same, one holds."""
    plain = name.lstrip("-")
    if plain in _REPEATED and len(words) > 1:
        return f"{plain} {words[1].partition('=')[0]}"
    return next((names for names in _SAME if name in names), name)


def _take_hosts(options: Sequence[str], launcher: str) -> tuple[str | None, list[str]]:
    """Return the list of hosts, and the options without it."""
    hosts, rest = None, []
    for name, words in arguments.options(options, launcher):
        if name in _HOSTS:
            hosts = words[1] if len(words) > 1 else words[0].partition("=")[2]
        else:
            rest += words
    return hosts, rest


def keep(settings: Settings, *, runs: str, name: str) -> Path | None:
    """Write them into the run's folder, beside config.json; return the file, None where none is kept.

    Raises:
        OSError: it cannot be written.
    """
    if not runs:
        return None
    path = Path(runs, name, _FILE)
    private_files.make_folder(path.parent)
    private_files.write_text(path, yaml.safe_dump(settings.document(), sort_keys=False, allow_unicode=True))
    return path


def read(path: str) -> Settings:
    """Return what a file says.

    Raises:
        UsageError: it cannot be read, or something in it cannot be; one line names the file, its line and the key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        # Composed, not loaded: nothing in it becomes an object, and each value keeps its line and its spelling.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as problem:
        raise UsageError(f"--config {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {path} is not text in UTF-8") from None
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where} is not YAML: {problem.problem or problem.context}") from None
    except (yaml.YAMLError, RecursionError) as problem:
        raise UsageError(f"{path} is not YAML: {str(problem).splitlines()[0]}") from None
    if root is None:
        return Settings()
    found = {key: value for key, value, _ in _pairs(root, path, tuple(_KEYS))}
    options = found.get("launcher-options", [])
    if "hosts" in found:
        options = ["-H", found["hosts"], *options]
    script = found.get("script")
    if found.get("arguments") and script is None:
        raise UsageError(f"{path}: arguments are a script's. Add the key script, such as script: train.py")
    settings = Settings(
        ranks=found.get("np"),
        max_restarts=found.get("max-restarts"),
        grace=found.get("grace"),
        launcher=found.get("launcher"),
        options=options,
        environment=found.get("environment", {}),
        program=[] if script is None else [script, *found.get("arguments", [])],
    )
    _check_options(settings, path)
    return settings


def _pairs(root: yaml.Node, path: str, known: Sequence[str]) -> list[tuple[str, Any, int]]:
    """Return (key, value, line) of a file's mapping, each value as its key wants it."""
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path} must hold keys and values, such as np: 2. Received: {_shown(root)}")
    pairs: list[tuple[str, Any, int]] = []
    for key_node, node in root.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else _shown(key_node)
        if key not in known:
            raise UsageError(f"{path}, line {line}: there is no key {key}{_instead(key, known)}")
        if any(key == before for before, _, _ in pairs):
            raise UsageError(f"{path}, line {line}: {key} is there twice. Keep one of them")
        try:
            pairs.append((key, _KEYS[key](node), line))
        except ValueError as problem:
            raise UsageError(f"{path}, line {node.start_mark.line + 1}: {key} {problem}") from None
    return pairs


def _instead(key: str, known: Sequence[str]) -> str:
    """Return what to write instead of a key that there is not."""
    if f"--{key}" in HOROVODRUN_OPTIONS:
        words = [f"--{key}", *["..."] * HOROVODRUN_OPTIONS[f"--{key}"]]
        return f", but horovodrun has the option. Write launcher-options: [{', '.join(words)}]"
    near = nearest(key.lstrip("-").replace("_", "-"), known)
    return f". Did you mean {near}?" if near else f". There are {', '.join(known)}"


def _check_options(settings: Settings, path: str) -> None:
    """Refuse launcher-options that are none."""
    try:
        for name, words in arguments.options(settings.options, settings.launcher or HOROVODRUN):
            if not name:
                raise UsageError(f"{words[0]} is no option, nor the value of one")
            if name in arguments.OURS:
                raise UsageError(f"{name} is hvdtrain run's own. Write the key {name.lstrip('-')}")
    except UsageError as problem:
        raise UsageError(f"{path}: launcher-options: {problem}") from None


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return node.value or "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _text(node: yaml.Node, must_be: str) -> str:
    """Return a value as it is written."""
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS:
        raise ValueError(f"must be {must_be}. Received: {_shown(node)}")
    text = str(node.value)
    if redact.HIDDEN in text:
        raise ValueError(
            f"was a secret, and is not kept in files. Write it in place of {redact.HIDDEN}, or leave it out"
        )
    if "\0" in text:
        raise ValueError(f"must be {must_be}. Received: text with a NUL in it")
    return text


def _texts(node: yaml.Node, must_be: str) -> list[str]:
    if not isinstance(node, yaml.SequenceNode):
        raise ValueError(f"must be {must_be}. Received: {_shown(node)}")
    return [_text(each, must_be) for each in node.value]


def _number(check: Callable[[str, str], object], must_be: str) -> Callable[[yaml.Node], str]:
    def read_number(node: yaml.Node) -> str:
        text = _text(node, must_be)
        try:
            check("", text)
        except UsageError:
            raise ValueError(f"must be {must_be}. Received: {text}") from None
        return text

    return read_number


def _launcher(node: yaml.Node) -> str:
    text = _text(node, "horovodrun or mpirun")
    if text not in (HOROVODRUN, MPIRUN):
        near = nearest(text, (HOROVODRUN, MPIRUN))
        raise ValueError(f"must be horovodrun or mpirun. Received: {text}{f'. Did you mean {near}?' if near else ''}")
    return text


def _environment(node: yaml.Node) -> dict[str, str]:
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"must be names and values, such as OMP_NUM_THREADS: 1. Received: {_shown(node)}")
    found: dict[str, str] = {}
    for key_node, value in node.value:
        name = _text(key_node, "names and values, such as OMP_NUM_THREADS: 1")
        if not name or "=" in name:
            raise ValueError(f"must be names and values, such as OMP_NUM_THREADS: 1. Received the name: {name!r}")
        try:
            found[name] = _text(value, "text or a number")
        except ValueError as problem:
            raise ValueError(f"{name} {problem}") from None
    return found


_KEYS: dict[str, Callable[[yaml.Node], Any]] = {
    "np": _number(lambda name, text: arguments.whole_number(name, text, least=1), "a whole number, at least 1"),
    "hosts": lambda node: _text(node, "text such as host1:2,host2:2"),
    "max-restarts": _number(
        lambda name, text: arguments.whole_number(name, text, least=0), "a whole number, at least 0"
    ),
    "grace": _number(arguments.seconds, "a number of seconds, 0 or more"),
    "launcher": _launcher,
    "launcher-options": lambda node: _texts(node, "a list of words, such as [--network-interfaces, eth0]"),
    "environment": _environment,
    "script": lambda node: _text(node, "text, such as train.py"),
    "arguments": lambda node: _texts(node, "a list of words, such as [--epochs, 90]"),
}

"""The file of `hvdtrain run --config`, and its combination with the command line, whose options win.

A key is an option without its dashes; each is optional. Values are used as written, and checked like options.
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
from hvdtrain.system.settings import did_you_mean
from hvdtrain.system.user_paths import expanded

_FILE = "run.yaml"
_SCALARS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "timestamp"))
_HOSTS = ("-H", "--hosts", "-host", "--host")
# Options of which the last one holds, whichever of these names it has.
_SAME = (
    frozenset({*_HOSTS, "-hostfile", "--hostfile", "-machinefile", "--machinefile", "--host-discovery-script"}),
    frozenset({"--gloo", "--mpi", "--jsrun"}),
)
# Options of mpirun that may be repeated with another first value: -x A=1 -x B=2.
_REPEATED = frozenset({"x", "mca", "gmca", "gpmixmca", "pmixmca"})
# What each key of a file holds: its form, the form in words, and a check of a text.
_KEYS: dict[str, tuple[type, str, Callable[[str], bool] | None]] = {
    "np": (str, "a whole number, at least 1", lambda text: arguments.is_count(text, least=1)),
    "hosts": (str, "text such as host1:2,host2:2", None),
    "max-restarts": (str, "a whole number, at least 0", lambda text: arguments.is_count(text, least=0)),
    "grace": (str, "a number of seconds, 0 or more", arguments.is_seconds),
    "launcher": (str, "horovodrun or mpirun", lambda text: text in (HOROVODRUN, MPIRUN)),
    "launcher-options": (list, "a list of words, such as [--network-interfaces, eth0]", None),
    "environment": (dict, "names and values, such as OMP_NUM_THREADS: 1", None),
    "script": (str, "text, such as train.py", None),
    "arguments": (list, "a list of words, such as [--epochs, 90]", None),
}


@dataclass(frozen=True)
class Settings:
    """The settings of a run: from a file, the command line, or both. None where nothing was given."""

    ranks: str | None = None
    max_restarts: str | None = None
    grace: str | None = None
    launcher: str | None = None
    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    program: list[str] = field(default_factory=list)

    def over(self, other: Settings) -> Settings:
        """Return these settings, and the other ones where these give nothing."""
        launcher = self.launcher or other.launcher
        mine, theirs = (list(arguments.options(each.options, launcher or HOROVODRUN)) for each in (self, other))
        given = {_meaning(name, words) for name, words in mine}
        # After --, options alone: more arguments for the file's script.
        more = bool(self.program) and self.program[0].startswith("-")
        return Settings(
            **{name: getattr(self, name) or getattr(other, name) for name in ("ranks", "max_restarts", "grace")},
            launcher=launcher,
            options=[word for name, words in theirs if _meaning(name, words) not in given for word in words]
            + self.options,
            environment={**other.environment, **self.environment},
            program=[*other.program, *self.program] if more else self.program or other.program,
        )

    def document(self) -> dict[str, Any]:
        """Return them as the file has them, with the values of secrets hidden."""
        given = arguments.options(self.options, self.launcher or HOROVODRUN)
        options = [word for name, words in given if name not in _HOSTS for word in words]
        grace = self.grace and float(self.grace)
        program = redact.words(self.program)
        found = {
            "np": self.ranks and int(self.ranks),
            "hosts": arguments.value(self.options, *_HOSTS),
            "max-restarts": self.max_restarts and int(self.max_restarts),
            "grace": int(grace) if isinstance(grace, float) and grace.is_integer() else grace,
            "launcher": self.launcher,
            "launcher-options": redact.words(options),  # -x TOKEN=...
            "environment": redact.variables(self.environment),
            "script": program[0] if program else None,
            "arguments": program[1:],
        }
        return {key: value for key, value in found.items() if value not in (None, [], {})}

    def save(self, runs: str, name: str) -> Path | None:
        """Write them into the run's folder, beside config.json; return the file, None where runs have no folder."""
        if not runs:
            return None
        path = expanded(runs) / name / _FILE
        private_files.make_folder(path.parent)
        private_files.write_text(path, yaml.safe_dump(self.document(), sort_keys=False, allow_unicode=True))
        return path

    def __str__(self) -> str:
        shown = []
        for key, value in self.document().items():
            words = [f"{name}={text}" for name, text in value.items()] if isinstance(value, dict) else value
            shown.append(f"{key} {shlex.join(words) if isinstance(words, list) else words}")
        return ", ".join(shown)


DEFAULTS = Settings(max_restarts="3", grace="30", launcher=HOROVODRUN)


def _meaning(name: str, words: Sequence[str]) -> str | frozenset[str]:
    """Return what an option is about: of two that are about the same, one holds."""
    plain = name.lstrip("-")
    if plain in _REPEATED and len(words) > 1:
        return f"{plain} {words[1].partition('=')[0]}"
    return next((names for names in _SAME if name in names), name)


def read(path: str) -> Settings:
    """Return what a file says; a UsageError of one line names the file, the line and the key that is wrong."""
    try:
        # Composed, not loaded: nothing in it becomes an object, and each value has its line and its spelling.
        root = yaml.compose(expanded(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as problem:
        raise UsageError(f"--config {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {path} is not text in UTF-8") from None
    except (yaml.YAMLError, RecursionError) as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        what = getattr(problem, "problem", None) or str(problem).splitlines()[0]
        raise UsageError(f"{path}{where} is not YAML: {what}") from None
    found = {} if root is None else _mapping(root, path)
    if found.get("arguments") and "script" not in found:
        raise UsageError(f"{path}: arguments are a script's. Add the key script, such as script: train.py")
    settings = Settings(
        found.get("np"), found.get("max-restarts"), found.get("grace"), found.get("launcher"),
        options=[*(["-H", found["hosts"]] if "hosts" in found else []), *found.get("launcher-options", [])],
        environment=found.get("environment", {}),
        program=[found["script"], *found.get("arguments", [])] if "script" in found else [],
    )  # fmt: skip
    try:
        for name, given in arguments.options(settings.options, settings.launcher or HOROVODRUN):
            if not name:
                raise UsageError(f"{given[0]} is no option, nor the value of one")
            if name in arguments.OURS:
                raise UsageError(f"{name} is hvdtrain run's own. Write the key {name.lstrip('-')}")
    except UsageError as problem:
        raise UsageError(f"{path}: launcher-options: {problem}") from None
    return settings


def _mapping(root: yaml.Node, path: str) -> dict[str, Any]:
    """Return a file's keys and values, each in the form that its key needs."""
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path} must hold keys and values, such as np: 2. Received: {_shown(root)}")
    found: dict[str, Any] = {}
    for key_node, node in root.value:
        where = f"{path}, line {key_node.start_mark.line + 1}"
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else _shown(key_node)
        if key not in _KEYS:
            raise UsageError(f"{where}: there is no key {key}{_instead(key)}")
        if key in found:
            raise UsageError(f"{where}: {key} appears twice. Remove one of them")
        try:
            found[key] = _value(node, *_KEYS[key])
        except ValueError as problem:
            raise UsageError(f"{path}, line {node.start_mark.line + 1}: {key} {problem}") from None
    return found


def _instead(key: str) -> str:
    """Return what to write instead of a key that does not exist."""
    if f"--{key}" in HOROVODRUN_OPTIONS:
        words = [f"--{key}", *["..."] * HOROVODRUN_OPTIONS[f"--{key}"]]
        return f", but horovodrun has the option. Write launcher-options: [{', '.join(words)}]"
    return did_you_mean(key.lstrip("-").replace("_", "-"), _KEYS, f"There are {', '.join(_KEYS)}")


def _value(node: yaml.Node, form: type, must_be: str, check: Callable[[str], bool] | None) -> Any:
    """Return a value in its form; a ValueError if it has another form."""
    if form is list and isinstance(node, yaml.SequenceNode):
        return [_text(each, must_be) for each in node.value]
    if form is dict and isinstance(node, yaml.MappingNode):
        return {_name(key, must_be): _text(each, "text or a number", of=f"{key.value} ") for key, each in node.value}
    if form is not str:
        raise ValueError(f"must be {must_be}. Received: {_shown(node)}")
    text = _text(node, must_be)
    if check is not None and not check(text):
        raise ValueError(f"must be {must_be}. Received: {text}{did_you_mean(text, (HOROVODRUN, MPIRUN))}")
    return text


def _name(node: yaml.Node, must_be: str) -> str:
    if not (name := _text(node, must_be)) or "=" in name:
        raise ValueError(f"must be {must_be}. Received the name: {name!r}")
    return name


def _text(node: yaml.Node, must_be: str, *, of: str = "") -> str:
    """Return a text or a number as it is written."""
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS or "\0" in node.value:
        raise ValueError(f"{of}must be {must_be}. Received: {_shown(node)}")
    if redact.HIDDEN in node.value:
        it = f"Write it in place of {redact.HIDDEN}, or leave it out"
        raise ValueError(f"{of}was a secret, and secrets are not saved. {it}")
    return str(node.value)


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value) if "\0" in node.value else node.value or "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"

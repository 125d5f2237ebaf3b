"""Read a launch command once: `hvdtrain run`'s own options, the launcher's, and the program."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.system import network, open_mpi
from hvdtrain.system.settings import did_you_mean

HOROVODRUN, MPIRUN = "horovodrun", "mpirun"

MAX_RANKS_A_CORE = 4


def _each(names: str, *, values: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), values)


# How many values each option takes. horovodrun's are Horovod 0.28.1's: a test compares them with its parser.
OURS = {
    **_each("-np --num-proc --max-restarts --grace --launcher --config", values=1),
    **_each("--debug --help", values=0),
}
_FLAGS = """-v --version -cb --check-build --disable-cache --verbose --hierarchical-allreduce
    --no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce
    --no-torus-allreduce --autotune --no-autotune --timeline-mark-cycles --no-timeline-mark-cycles --no-stall-check
    --stall-check --mpi-threads-disable --no-mpi-threads-disable --tcp --log-with-timestamp --log-without-timestamp
    -prefix-timestamp --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp --gloo --mpi --jsrun
"""
_VALUED = """--start-timeout --network-interfaces --network-interface --output-filename --config-file -p --ssh-port -i
    --ssh-identity-file --fusion-threshold-mb --cycle-time-ms --cache-capacity --autotune-log-file
    --autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
    --autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout
    --reset-limit --timeline-filename --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds --mpi-args
    --binding-args --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level -H --hosts -hostfile
    --hostfile --host-discovery-script"""
HOROVODRUN_OPTIONS = {**_each(_FLAGS, values=0), **_each(_VALUED, values=1), "--blacklist-cooldown-range": 2}
# Open MPI's options may have one dash or two.
_MPIRUN_VALUED = """x H host hostfile machinefile default-hostfile map-by bind-to rank-by wd wdir path prefix N npernode
    npersocket ppr output-filename timeout am tune rf rankfile cpu-list cpu-set slot-list report-uri stdin personality
    preload-files app launch-agent ompi-server dvm max-vm-size cpus-per-proc cpus-per-rank report-state-on-timeout-file
    debugger output display runtime-options tmpdir forward-signals pset xterm with-ft initial-errhandler
    memory-alloc-kinds gpu-support app-prefix amca c n"""
_MPIRUN_VALUES = {
    **_each(_MPIRUN_VALUED, values=1),
    **_each("mca gmca gpmixmca pmixmca prtemca omca gomca", values=2),
}

_MOST_DIGITS = 9  # of a count: Python refuses to read some thousands of them
# Options that choose the cores of ranks.
_PLACES = "bind-to map-by rf rankfile cpu-list cpu-set slot-list cpus-per-proc cpus-per-rank npersocket ppr"


@dataclass(frozen=True)
class Split:
    """A command line in three parts."""

    ours: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    program: list[str] = field(default_factory=list)


def split(arguments: Sequence[str], *, launcher_in: Callable[[str], str | None] = lambda file: None) -> Split:
    """Split the words after `hvdtrain run`; `launcher_in` returns which launcher a --config file names."""
    problems: list[UsageError] = []
    # How many values an option takes depends on the launcher, which is among the options: try each.
    for launcher in (HOROVODRUN, MPIRUN):
        parts = Split()
        try:
            for name, words in options(arguments, launcher):
                (parts.program if not name else parts.ours if name in OURS else parts.passed).extend(words)
        except UsageError as error:
            problems.append(error)
            continue
        file = value(parts.ours, "--config")
        if (value(parts.ours, "--launcher") or (file and launcher_in(file)) or HOROVODRUN) == launcher:
            return parts
    if problems:
        raise problems[0]
    return parts  # a launcher that does not exist


def options(arguments: Sequence[str], launcher: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each option's name with its words, then "" with the program's, from the first word that is no option's."""
    i = 0
    while i < len(arguments):
        word = arguments[i]
        if word == "--" or not word.startswith("-"):
            yield "", list(arguments[i + (word == "--") :])
            return
        name, equals, _ = word.partition("=")
        values = 0 if equals else OURS[name] if name in OURS else _values(name, launcher)
        if i + values >= len(arguments) and values:
            raise UsageError(f"{name} needs {'a value' if values == 1 else f'{values} values'}")
        yield name, list(arguments[i : i + 1 + values])
        i += 1 + values


def _values(name: str, launcher: str) -> int:
    """Return how many values an option of the launcher takes."""
    if launcher == MPIRUN:
        return _MPIRUN_VALUES.get(name.lstrip("-"), 0)
    if name in HOROVODRUN_OPTIONS:
        return HOROVODRUN_OPTIONS[name]
    # argparse takes the beginning of a long option for the whole, if there is only one that begins so.
    whole = [known for known in HOROVODRUN_OPTIONS if name.startswith("--") and known.startswith(name)]
    if len({HOROVODRUN_OPTIONS[known] for known in whole}) == 1:
        return HOROVODRUN_OPTIONS[whole[0]]
    raise UsageError(
        f"{name} is an option neither of hvdtrain run nor of horovodrun"
        + did_you_mean(name, [*HOROVODRUN_OPTIONS, *OURS], "`horovodrun --help` lists its options")
    )


def value(options: Sequence[str], *names: str) -> str | None:
    """Return the value that one of `names` has among `options`; None if it is not there."""
    found = None
    for i, word in enumerate(options):
        name, equals, text = word.partition("=")
        if name in names:
            found = text if equals else options[i + 1] if i + 1 < len(options) else ""
    return found


@dataclass(frozen=True)
class LaunchSpec:
    """A launch: the program, the hosts, and the launcher."""

    launcher: str = HOROVODRUN  # or "mpirun"; the program's name where a single rank needs no launcher
    ranks: int = 1
    options: Sequence[str] = ()  # the launcher's own, as the user wrote them
    hosts: Mapping[str, int] = field(default_factory=dict)  # {host: slots}; empty for this host alone
    elastic: bool = False  # hosts may come and go, and the launcher replaces ranks itself
    program: Sequence[str] = ()  # what each rank runs

    @property
    def is_mpirun(self) -> bool:
        """True if mpirun starts the ranks itself, not for horovodrun."""
        return self.launcher == MPIRUN

    @property
    def over_gloo(self) -> bool:
        """True if no mpirun takes part."""
        return self.elastic or (not self.is_mpirun and "--gloo" in self.options)

    @cached_property
    def is_here(self) -> bool:
        """True if all hosts that were named are this one."""
        return network.is_here(self.hosts)

    @cached_property
    def is_elsewhere(self) -> bool:
        """True if no rank is on this host."""
        return bool(self.hosts) and not any(network.is_here([host]) for host in self.hosts)

    def option(self, *names: str) -> str | None:
        """Return the value that one of `names` has among the options; None without it."""
        return value(self.options, *names)

    def option_names(self) -> set[str]:
        """Return all words of the options without their dashes: mpirun takes one dash or two."""
        return {word.lstrip("-") for word in self.options}


def _names(options: Sequence[str]) -> set[str]:
    return {word.lstrip("-").partition("=")[0] for word in options if word.startswith("-")}


def places_ranks(options: Sequence[str]) -> bool:
    """Return whether mpirun's `options` choose the cores of ranks."""
    return bool(_names(options) & {*_PLACES.split()}) or any("binding_policy" in word for word in options)


def marks(options: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the options with which mpirun marks each line with its rank, as horovodrun does, for lines in pieces."""
    if environment.get("OMPI_MCA_orte_tag_output") == "0" or _names(options) & {"tag-output", "output", "xml"}:
        return []
    return ["--tag-output", *(open_mpi.MARK_PIECES if open_mpi.mixes_lines() else ())]


def whole_number(name: str, text: str | None, *, least: int) -> int:
    """Return `text` as a number of at least `least`."""
    if text is None or not is_count(text, least=least):
        raise UsageError(f"{name} must be a whole number, at least {least}. Received: {name} {text}")
    return int(text)


def is_count(text: str, *, least: int) -> bool:
    """Return whether `text` is a whole number of at least `least`, short enough for Python to read."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) >= least


def is_seconds(text: str) -> bool:
    """Return whether `text` is a time, 0 or more and finite."""
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def program(words: Sequence[str]) -> list[str]:
    """Return what every rank runs: `words`, with this interpreter before a script; it must exist."""
    if not words:
        raise UsageError("say what to run: hvdtrain run -np 2 train.py")
    first = words[0]
    if first.endswith(".py"):
        return [sys.executable, _script(first), *words[1:]]
    found = shutil.which(first)
    if found is None:
        path = Path(first)
        what = f"{path.resolve()} may not be executed" if path.is_file() else f"there is no program {first}"
        raise UsageError(f"{what}. Give a Python script, or a program with its path")
    if Path(first).name.startswith("python"):
        # The script is the first word that is neither an option nor, as after -X and -W, an option's value.
        rest = iter(words[1:])
        for word in rest:
            if word in ("-c", "-m", "-"):
                break
            if word in ("-X", "-W"):
                next(rest, None)
            elif not word.startswith("-"):
                _script(word)
                break
    return list(words)


def _script(name: str) -> str:
    if not Path(name).is_file():
        raise UsageError(f"there is no script {name} in {os.getcwd()}")
    if not os.access(name, os.R_OK):
        raise UsageError(f"the script {name} cannot be read: permission denied. Type: chmod u+r {shlex.quote(name)}")
    return name


def hosts(passed: Sequence[str]) -> dict[str, int]:
    """Return {host: slots} as -H or --hostfile names them; {} without these."""
    named = value(passed, "-H", "--hosts", "-host", "--host")
    file = value(passed, "-hostfile", "--hostfile", "-machinefile", "--machinefile")
    pairs: list[tuple[str, str]] = []
    wrong = f"-H must be like host1:2,host2:2. Received: -H {named}"
    if named is not None:
        items = [item.strip() for item in named.split(",")]
        pairs = [(item.rpartition(":")[0], item.rpartition(":")[2]) if ":" in item else (item, "1") for item in items]
    elif file is not None:
        try:
            lines = [line.partition("#")[0].split() for line in Path(file).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as problem:
            raise UsageError(f"the host file {file} cannot be read: {problem}") from None
        wrong = f"each line of the host file {file} must be like `host1 slots=2`"
        for words in filter(None, lines):
            slots = next((word.partition("=")[2] for word in words[1:] if word.startswith("slots=")), "1")
            pairs.append((words[0], slots))
        if not pairs:
            raise UsageError(f"the host file {file} names no host")
    found: dict[str, int] = {}
    for name, slots in pairs:
        if not name or not is_count(slots, least=1):
            raise UsageError(wrong + f". Received: {name} slots={slots}" * (named is None))
        found[name] = found.get(name, 0) + int(slots)
    return found


def listed(slots: Mapping[str, int]) -> str:
    """Return hosts as -H takes them."""
    return ",".join(f"{name}:{number}" for name, number in slots.items())


def check_ranks(
    ranks: int, *, slots: Mapping[str, int], elastic: bool, cores: int,
    name: str = "-np ", room: str = "slots of {}", insist: str = "-H localhost:{}",
) -> str:  # fmt: skip
    """Raise a UsageError, of `name`, `room` and `insist`, for too many ranks; return a note on crowded cores, or ""."""
    if slots and ranks > sum(slots.values()):
        raise UsageError(f"{name}{ranks} is more than the {sum(slots.values())} {room.format(listed(slots))}")
    if slots or elastic:
        return ""
    if ranks > MAX_RANKS_A_CORE * cores:
        raise UsageError(
            f"{name}{ranks} is more than {MAX_RANKS_A_CORE} ranks for each of the {cores} cores here. Use fewer, or "
            f"insist with {insist.format(ranks)}"
        )
    return f"{ranks} ranks share {cores} core{'s' * (cores > 1)}" if ranks > cores else ""

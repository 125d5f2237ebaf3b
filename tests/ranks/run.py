"""Run the rank tests: pytest itself under horovodrun, at 2 and 3 ranks, for every framework and Keras backend.

    python tests/ranks/run.py                                   # each claim at the cheapest place that can prove it
    python tests/ranks/run.py --all                             # every test everywhere it holds
    python tests/ranks/run.py --all --np 2 --only keras-jax -- -k accumulation
    python tests/ranks/run.py --core                            # what a framework's new version would break first

A claim about the Trainer is proven on PyTorch; the marks `every_backend` and `on_keras` say which of these tests run on
Keras too. At 3 ranks Keras runs what no 2 ranks can show (`three_ranks`, or `world_size(3)` alone).

What this promises, each proven in tests/e2e/project/test_harness.py: a rank that fails a test fails the run and shows
that rank's own traceback once; the other ranks are ended and the tests that are left go on in fresh ranks; a hang ends
at the test's limit with every rank's stacks; ranks that would run different tests, or no test at all, are failures.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch import HERE, Launch, Limits, Outcome

SIZES = (2, 3)
EVERY_TEST = ""


@dataclass(frozen=True)
class Group:
    """A folder of tests, the environment that it runs in, and which of its tests run at which world size.

    `marks` has pytest's -m expression by world size. With --all, a group runs whole at each of `sizes`.
    """

    name: str
    folder: str
    framework: str
    backend: str | None = None
    launcher_options: tuple[str, ...] = ()
    marks: dict[int, str] = field(default_factory=lambda: dict.fromkeys(SIZES, EVERY_TEST))
    sizes: tuple[int, ...] = SIZES
    packages: tuple[str, ...] = ()  # needed beside the framework; such a group runs where --only names it
    also: tuple[str, ...] = ()  # further folders whose tests the same ranks run
    # Without --all the ranks of this other group run its tests, so that its framework starts once, not twice.
    runs_in: str = ""

    def environment(self) -> dict[str, str]:
        """Return what this group adds to the ranks' environment."""
        variables = {"HVDTRAIN_TEST_FRAMEWORK": self.framework}
        if self.backend:
            variables["KERAS_BACKEND"] = self.backend
        if self.backend == "jax" and os.environ.get("HVDTRAIN_TEST_GPU") != "1":
            variables["JAX_PLATFORMS"] = "cpu"
            # Half of JAX's time here is LLVM's, which makes code fast that runs six steps.
            variables["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        return variables


GROUPS = (
    Group("torch", "torch", "torch", marks={2: EVERY_TEST, 3: "not two_suffice"}),
    Group("torch-gloo", "torch", "torch", None, ("--gloo",), marks={2: "over_gloo"}, sizes=(2,)),
    # Replicas of two ranks each.
    Group("torch-grid", "torch", "torch", marks={4: EVERY_TEST}, sizes=(4,)),
    # Of Keras's backends torch starts in the least time and compiles nothing; TensorFlow traces for a second a test.
    Group(
        "keras-tensorflow",
        "keras",
        "keras",
        "tensorflow",
        marks={2: "every_backend or in_graphs"},
        also=("tensorflow",),
    ),
    Group("keras-torch", "keras", "keras", "torch", marks={2: "every_backend or not in_graphs", 3: "three_ranks"}),
    Group("keras-jax", "keras", "keras", "jax", marks={2: "every_backend"}),
    Group("trainer-torch", "training", "torch", runs_in="torch"),
    Group(
        "trainer-keras-tensorflow",
        "training",
        "keras",
        "tensorflow",
        marks={2: "every_backend"},
        runs_in="keras-tensorflow",
    ),
    Group("trainer-keras-torch", "training", "keras", "torch", marks={2: "every_backend or on_keras"}),
    # JAX compiles for minutes here. keras-jax has three ranks of its collectives, the groups above of the Trainer.
    Group("trainer-keras-jax", "training", "keras", "jax", marks={2: "every_backend"}, sizes=(2,), runs_in="keras-jax"),
    # `make models` installs these packages.
    Group("models", "models", "torch", packages=("transformers", "accelerate", "peft", "ignite", "lightning")),
)

# `--core`, by folder: that ranks train as one process does, through each framework's optimizers, steps and state.
CORE = {
    "torch": (
        "test_optimizer.py",
        "test_equal_to_others.py",
        "test_trainer_torch.py",
        "test_grid.py",
        "test_grid_trainer.py",
    ),
    "keras": ("test_optimizer.py", "test_updates.py", "test_precision.py"),
    "training": ("test_trainer.py", "test_same_bits.py"),
}


def mpi_is_built() -> bool:
    """Say whether Horovod's native library was linked with MPI, without loading it (horovodrun's check takes 14 s)."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return False
    libraries = [path for place in spec.submodule_search_locations for path in Path(place).glob("*/mpi_lib*.so")]
    return any(b"libmpi.so" in path.read_bytes() for path in libraries)


def missing(group: Group) -> str:
    """Return what a group needs and this environment has not: TensorFlow on a GPU host, say."""
    needed = (group.framework, group.backend, *group.packages)
    return next((name for name in needed if name and importlib.util.find_spec(name) is None), "")


@dataclass
class Totals:
    """Counts over all groups."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    warnings: set[str] = field(default_factory=set)


class Progress:
    """A mark for each test that rank 0 finished, or a line with --verbose."""

    def __init__(self, label: str, *, verbose: bool) -> None:
        self.verbose = verbose
        self.label = label
        self.since = time.monotonic()
        self.open_line = not verbose
        print(f"{label}: ", end="" if self.open_line else "\n", flush=True)

    def __call__(self, nodeid: str, skipped: bool) -> None:
        if self.verbose:
            now = time.monotonic()
            print(f"  {now - self.since:6.1f} s  {nodeid}{'  skipped' if skipped else ''}", flush=True)
            self.since = now
        else:
            print("s" if skipped else ".", end="", flush=True)

    def close_line(self) -> None:
        """End the line of marks."""
        if self.open_line:
            print(flush=True)


def run_group(group: Group, size: int, options: argparse.Namespace, base: Path, totals: Totals) -> None:
    """Run one group at one world size, in fresh ranks again after each failed test, and add to `totals`."""
    label = f"{group.name} np={size}"
    whole = options.all or options.core or options.path
    expression = EVERY_TEST if whole else group.marks.get(size, EVERY_TEST)
    folder = HERE / group.folder
    guests = [] if whole or options.only else [each for each in GROUPS if each.runs_in == group.name]
    whole_folders = [HERE / name for name in (group.folder, *group.also, *(each.folder for each in guests))]
    targets = [folder / name for name in CORE[group.folder]] if options.core else whole_folders
    targets = targets if options.path is None else [options.path.resolve()]
    for target in targets:
        if not target.exists():
            totals.failed += 1
            print(f"FAILED {label}: there is no {target}", flush=True)
            return
    started = time.monotonic()
    progress = Progress(label, verbose=options.verbose)
    outcomes: list[Outcome] = []
    done: list[str] = []
    while True:
        outcome = Launch(
            size=size,
            targets=targets,
            directory=base / f"{group.name}-{size}-{len(outcomes)}",
            environment=group.environment(),
            launcher_options=group.launcher_options,
            pytest_arguments=[*(("-m", expression) if expression else ()), *options.pytest_arguments],
            done=done,
            limits=Limits(test_s=options.test_limit, start_s=options.start_limit, group_s=options.group_limit),
            on_test=progress,
        ).run()
        outcomes.append(outcome)
        done += outcome.done
        if not outcome.failures or not outcome.repeatable or len(outcomes) >= options.max_failures:
            break
    progress.close_line()
    report(label, outcomes, time.monotonic() - started, options, totals)


def report(
    label: str, outcomes: Sequence[Outcome], seconds: float, options: argparse.Namespace, totals: Totals
) -> None:
    """Print a group's failures and its summary line."""
    passed = sum(len(outcome.passed) for outcome in outcomes)
    skipped = {nodeid: reason for outcome in outcomes for nodeid, reason in outcome.skipped.items()}
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    for failure in failures:
        ranks = "rank " + ", ".join(map(str, failure.ranks)) if failure.ranks else "all ranks"
        print(f"\n===== FAILED {label}: {failure.nodeid or 'outside a test'} ({ranks}) =====\n{failure.text}\n")
    failed = len({failure.nodeid for failure in failures})
    if not failures and not passed:
        narrowed = bool(options.pytest_arguments) and not skipped
        print(f"{label}: no test {'matched' if narrowed else 'ran'}", flush=True)
        failed = 0 if narrowed else 1
    elif outcomes[-1].failures and outcomes[-1].repeatable:
        print(f"{label}: stopped after {len(outcomes)} launches with failures; some tests did not run")
    for reason, number in sorted(Counter(skipped.values()).items()):
        print(f"  skipped {number}: {reason}")
    counts = [f"{passed} passed"] + [f"{failed} failed"] * bool(failed) + [f"{len(skipped)} skipped"] * bool(skipped)
    print(f"{label}: {', '.join(counts)} in {seconds:.0f} s", flush=True)
    if options.verbose:  # which a busy machine changes less
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"  processor time so far: {used.ru_utime + used.ru_stime:.0f} s", flush=True)
    totals.passed += passed
    totals.failed += failed
    totals.skipped += len(skipped)
    totals.warnings |= {warning for outcome in outcomes for warning in outcome.warnings}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what follows `--` goes to pytest."""
    arguments, pytest_arguments = list(arguments), []
    if "--" in arguments:
        split = arguments.index("--")
        arguments, pytest_arguments = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--np", type=int, action="append", help="only at this world size (may be repeated)")
    names = [group.name for group in GROUPS]
    parser.add_argument("--only", action="append", choices=names, help="only this group (may be repeated)")
    parser.add_argument("--all", action="store_true", help="every test on every backend, not only what is marked so")
    parser.add_argument("--core", action="store_true", help="only the files in CORE, at 2 ranks, not over --gloo")
    parser.add_argument("--path", type=Path, help="run this file or folder instead of the group's folder")
    parser.add_argument("--test-limit", type=float, default=120.0, help="seconds a test may take [120]")
    parser.add_argument("--start-limit", type=float, default=180.0, help="seconds to import and collect [180]")
    parser.add_argument("--group-limit", type=float, default=900.0, help="seconds one launch of a group may take [900]")
    parser.add_argument("--max-failures", type=int, default=5, help="stop a group after this many failures [5]")
    parser.add_argument("--verbose", "-v", action="store_true", help="a line per test, with its time")
    parser.add_argument("--keep", action="store_true", help="keep the ranks' logs even when all is well")
    options = parser.parse_args(arguments)
    options.pytest_arguments = pytest_arguments
    return options


def select(options: argparse.Namespace) -> list[tuple[Group, int]]:
    """Return the rows of the matrix that the options leave."""
    groups = [group for group in GROUPS if (group.name in options.only if options.only else not group.packages)]
    if options.core or not (options.only or mpi_is_built()):
        # Without MPI every group runs over Gloo already.
        groups = [group for group in groups if "--gloo" not in group.launcher_options]
    if not (options.only or options.all or options.core or options.path):
        groups = [group for group in groups if not group.runs_in]
    rows = []
    for group in groups:
        if lacking := missing(group):
            print(f"{group.name}: skipped, {lacking} is not installed", flush=True)
            continue
        usual = group.sizes if options.all else tuple(group.marks)
        sizes = options.np or ([2] if options.core else usual)
        rows += [(group, size) for size in sizes if options.only or size in usual or size not in SIZES]
    return rows


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for and return the exit status."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended too
    rows = select(options)
    totals = Totals()
    base = Path(tempfile.mkdtemp(prefix="hvdtrain-ranks-"))
    started = time.monotonic()
    try:
        for group, size in rows:
            run_group(group, size, options, base, totals)
    finally:
        if totals.failed or options.keep:
            print(f"the ranks' logs are in {base}")
        else:
            shutil.rmtree(base, ignore_errors=True)
    for warning in sorted(totals.warnings):
        print(f"warning: {warning}")
    if totals.passed + totals.failed == 0:
        totals.failed = 1
        print("no test ran")
    print(f"{len(rows)} groups, {totals.skipped} skipped, {time.monotonic() - started:.0f} s")
    print(f"{totals.passed} passed, {totals.failed} failed")
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

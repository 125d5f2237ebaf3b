"""`hvdtrain.run`: a function on several ranks of this host, from a notebook or a script."""

from __future__ import annotations

import functools
import linecache
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, TypeVar

from hvdtrain.distributed import tuning
from hvdtrain.errors import UsageError
from hvdtrain.launch import arguments, job_environment, job_folder
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.launch.exchange import Message, pack
from hvdtrain.launch.function_job import FunctionJob, Outcome, until_ended
from hvdtrain.launch.rank_output import Line
from hvdtrain.system import start_ranks

T = TypeVar("T")

WORKER = [sys.executable, "-m", "hvdtrain.launch.rank"]


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
    output: Literal["all", "root"] = "all",
    options: Sequence[str] = (),
) -> list[T]:
    """Call `fn(*args, **kwargs)` on `np` new ranks of this host and return what it returned on each, in rank order.

    The function, and what it uses, may be defined in a notebook's cell or in the script itself. The ranks' output
    appears here as it comes. An interrupt (Ctrl-C) requests a stop, as with `hvdtrain run`, and gives the ranks 30 s to
    write a checkpoint; a second one ends them at once. No process is left behind.

    Args:
        fn: what to call. Its data should be loaded or made in it, on each rank: arguments are copied to all of them.
        args: its positional arguments.
        kwargs: its keyword arguments.
        np: number of ranks; up to four for each core.
        output: "all" shows every rank's lines, behind "[rank] "; "root" shows rank 0's as they are.
        options: further options of horovodrun, such as ("--gloo",).

    Raises:
        TypeError: `fn` cannot be called, or an argument or a returned value cannot be pickled.
        ValueError: np or output is out of range.
        UsageError: no ranks can be started here, for example from within a rank.
        RankFailedError: a rank was killed or ended without a result. It is also the cause (`__cause__`) of an exception
            that `fn` raised on a rank, which is raised here as it is, and has the rank and its traceback.
    """
    spec, crowded = _check(fn, args, np, output, options)
    task = make_task(fn, args, kwargs)
    show = functools.partial(show_lines, output=output)
    run_dir, elsewhere = job_folder.make(0 if spec.over_gloo else spec.ranks)
    show([(None, f"hvdtrain.run: {note}") for note in (crowded, elsewhere) if note])
    try:
        environment = job_environment.environment(run_dir, spec, name=name_of(fn))
        # Else a rank's lines would wait in its buffer. What an init in this process has chosen for it is not theirs.
        environment = {**tuning.without_ours(environment), "PYTHONUNBUFFERED": "1"}
        line = [*start_ranks.horovodrun(Path(sys.executable)), "-np", str(np), *spec.options, *spec.program]
        with closing(FunctionJob(spec, line, environment=environment, run_dir=run_dir, task=task, show=show)) as job:
            until_ended(job.follow, job.interrupt)
    finally:
        job_folder.remove(run_dir)
    return _returned(job.outcome, show, output=output)


def _returned(outcome: Outcome, show: Callable[[Sequence[Line]], None], *, output: str) -> list[Any]:
    """Return what the function returned on each rank, and show a later failure."""
    values = outcome.values(root_only=output == "root")
    if outcome.cause is None or outcome.cause.code:
        how = outcome.cause or "the process that ran the ranks was killed"
        show([(None, f"hvdtrain.run: {how}, after the function had returned on every rank")])
    return values


def make_task(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Message:
    """Return what `hvdtrain.launch.rank.load` loads; raise a TypeError where something cannot be pickled."""
    cached = linecache.cache.items()  # a notebook's cells have no file
    cells = {name: list(entry[2]) for name, entry in cached if len(entry) == 4 and entry[1] is None}
    return Message(
        {"path": [str(path) for path in sys.path], "cells": cells},
        pack({"fn": fn, "args": tuple(args), "kwargs": dict(kwargs or {})}, where="be sent to the ranks"),
    )


def name_of(fn: Callable[..., Any]) -> str:
    """Return what a run of `fn` is called."""
    return re.sub(r"\W+", "", getattr(fn, "__name__", "")) or "function"


def show_lines(lines: Sequence[Line], *, output: str) -> None:
    """Print what ranks have printed, and with rank None what is said about the job; `output` is `run`'s."""
    chosen = [(rank, text) for rank, text in lines if output == "all" or not rank]
    marked = [text if rank is None or output == "root" else f"[{rank}] {text}" for rank, text in chosen]
    print("".join(f"{line}\n" for line in marked), end="", flush=True)


def check_call(fn: Callable[..., Any], args: Sequence[Any], np: int, output: str = "all") -> None:
    """Raise a TypeError or a ValueError unless `fn` can be called with `args` on `np` ranks."""
    if not callable(fn):
        raise TypeError(f"fn must be a function. Received: {fn!r}")
    if not isinstance(args, (tuple, list)):  # (x) is no tuple, and a text has letters
        raise TypeError(f"args must be a tuple, such as (x,). Received: a {type(args).__qualname__}")
    if isinstance(np, bool) or not isinstance(np, int) or np < 1:
        raise ValueError(f"np, the number of ranks, must be a whole number, at least 1. Received: np={np!r}")
    if output not in ("all", "root"):
        raise ValueError(f'output must be "all" or "root". Received: output={output!r}')


def _check(
    fn: Callable[..., Any], args: Sequence[Any], np: int, output: str, options: Sequence[str]
) -> tuple[LaunchSpec, str]:
    """Check what can be checked before the start; return what to launch, and a note on ranks that share cores."""
    check_call(fn, args, np, output)
    job_environment.check_place("hvdtrain.run")
    parts = arguments.split([*options, "fn"])
    if parts.ours or parts.program != ["fn"]:
        raise UsageError(f"options are horovodrun's, each word by itself. Received: options={options!r}")
    if arguments.value(parts.passed, "--host-discovery-script", "--min-np", "--min-num-proc") is not None:
        raise UsageError("hvdtrain.run has a fixed number of ranks. `hvdtrain run` starts elastic jobs")
    spec = LaunchSpec(ranks=np, options=parts.passed, hosts=arguments.hosts(parts.passed), program=WORKER)
    if not spec.is_here:
        raise UsageError(
            f"hvdtrain.run is for this host, and {', '.join(spec.hosts)} is not all here. Use `hvdtrain run`"
        )
    job_environment.check_host(spec)
    try:
        crowded = arguments.check_ranks(
            np, slots=spec.hosts, elastic=False, cores=tuning.usable_cores(), name="np=",
            insist='options=("-H", "localhost:{}")',
        )  # fmt: skip
    except UsageError as error:
        raise ValueError(str(error)) from None
    return spec, crowded

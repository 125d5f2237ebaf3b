"""`hvdtrain.integrations.spark.run`: a function on several ranks, each a task of one Spark job."""

from __future__ import annotations

import functools
import importlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from hvdtrain.errors import PackageMissingError, UsageError
from hvdtrain.horovod_build.shared import proof
from hvdtrain.integrations import rendezvous
from hvdtrain.integrations.spark.ranks import Ranks
from hvdtrain.launch import function, job_environment

T = TypeVar("T")

_PASSED_ON = ("HVDTRAIN_", "HOROVOD_", "KERAS_BACKEND")  # from the caller's environment; executors have their own


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
    output: Literal["all", "root"] = "all",
    environment: Mapping[str, str] | None = None,
    start_timeout_s: float = 120.0,
) -> list[T]:
    """Call `fn(*args, **kwargs)` on `np` new ranks, one per Spark task, and return what each returned, in rank order.

    This is `hvdtrain.run` on the executors of the active SparkSession. What ranks print appears here at once. An
    interrupt (Ctrl-C) asks the ranks to stop and gives them 30 s to write a checkpoint; a second one ends them at once.
    All ranks start together, or none (Spark's barrier mode), so dynamic allocation must be off. hvdtrain and its
    Horovod must be installed on the executors. Ranks use Gloo, or NCCL if Horovod was built with it.

    Args:
        fn: what to call. Its data should be loaded in it, on each rank: arguments are copied to all of them.
        args: its positional arguments.
        kwargs: its keyword arguments.
        np: number of ranks.
        output: "all" shows every rank's lines, behind "[rank] "; "root" shows rank 0's as they are.
        environment: variables for the ranks. They also get their executor's, and this process's HVDTRAIN_...,
            HOROVOD_... and KERAS_BACKEND.
        start_timeout_s: how long to wait for executors, and for task slots that other jobs use.

    Raises:
        TypeError: `fn` cannot be called, or an argument or a returned value cannot be pickled.
        ValueError: np or output is out of range; the cluster has fewer task slots than np.
        UsageError: there is no SparkSession, or no ranks can be started.
        PackageMissingError: PySpark is not installed.
        RankFailedError: a rank was killed, lost with its executor, or ended without a result. It is also the cause
            (`__cause__`) of an exception that `fn` raised on a rank; that exception is raised here unchanged.
    """
    function.check_call(fn, args, np, output)
    if not start_timeout_s > 0:
        raise ValueError(f"start_timeout_s must be > 0. Received: start_timeout_s={start_timeout_s!r}")
    context = _context()
    job_environment.check_place("hvdtrain.integrations.spark.run")
    deadline = time.monotonic() + start_timeout_s
    _wait_for_slots(context, np, deadline, start_timeout_s)
    task = function.make_task(fn, args, kwargs)
    chosen = {
        **rendezvous.environment(function.name_of(fn), environment or {}, passed=_PASSED_ON),
        proof.VARIABLE: proof.new_key(),
    }
    show = functools.partial(function.show_lines, output=output)
    ranks = Ranks(context, np, show=show, deadline=deadline, limit_s=start_timeout_s)
    try:
        with _plain_interrupts():
            ranks.run(task, chosen)
    finally:
        ranks.close()
    problem = ranks.own_problem()
    if problem is not None:
        raise problem
    values, cause = ranks.outcome.values(root_only=output == "root"), ranks.outcome.cause
    if cause is not None and cause.code:
        show([(None, f"hvdtrain: {cause}, after the function had returned on every rank")])
    return values


def _context() -> Any:
    try:
        pyspark = importlib.import_module("pyspark")
    except ImportError:
        raise PackageMissingError("PySpark is not installed. Run: pip install 'hvdtrain[spark]'") from None
    context = pyspark.SparkContext._active_spark_context
    if context is None:
        raise UsageError(
            "no SparkSession is active in this process. Call SparkSession.builder.getOrCreate() first. A session of "
            "Spark Connect does not work: it has no barrier jobs, which hvdtrain needs"
        )
    return context


def _wait_for_slots(context: Any, np: int, deadline: float, limit_s: float) -> None:
    """Wait until executors have room for all ranks; raise a ValueError where they do not get it."""
    spark = context._jsc.sc()
    local = bool(spark.isLocal())
    profile = spark.resourceProfileManager().resourceProfileFromId(0)
    while (there := int(spark.maxNumConcurrentTasks(profile))) < np:
        if local or time.monotonic() > deadline:
            waited = "" if local else f", also after {limit_s:g} s"
            more = f'master("local[{np}]")' if local else "more executors or cores, or a smaller spark.task.cpus"
            raise ValueError(
                f"each rank needs a task slot, and Spark ({context.master}) has {there}{waited}. Received: np={np}. "
                f"Use fewer ranks, or {more}"
            )
        time.sleep(0.5)


@contextmanager
def _plain_interrupts() -> Iterator[None]:
    """Make Ctrl-C a KeyboardInterrupt alone: PySpark's own handler would end all jobs before ranks could stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

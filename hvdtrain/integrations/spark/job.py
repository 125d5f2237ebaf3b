"""The Spark job whose tasks are the ranks."""

from __future__ import annotations

import functools
import importlib
import os
import secrets
from typing import Any

from hvdtrain.integrations.spark.task import RankEnd, TaskPlan, run_rank


def slots(context: Any) -> int:
    """Return how many tasks can run at once on the executors that there are now, busy or not."""
    spark = context._jsc.sc()
    return int(spark.maxNumConcurrentTasks(spark.resourceProfileManager().resourceProfileFromId(0)))


class SparkJob:
    """One Spark job with a task for each rank. Spark starts all tasks together, and does not retry a failed one.

    `end` is a file descriptor that can be read once the job has ended.
    """

    def __init__(self, context: Any) -> None:
        self.ends: list[RankEnd] = []  # how the ranks ended
        self.error: Exception | None = None  # why the job failed
        self._context = context
        self._group = f"hvdtrain-{secrets.token_hex(4)}"
        self._thread: Any = None
        self.end, self._write_end = os.pipe()

    def start(self, plan: TaskPlan) -> None:
        """Start it, in a separate thread."""
        thread = importlib.import_module("pyspark").InheritableThread
        self._thread = thread(target=self._run, args=(plan,), daemon=True, name=self._group)
        self._thread.start()

    def cancel(self) -> None:
        """Have Spark end its tasks. This misses tasks that start later: call it again until the job has ended."""
        self._context.cancelJobGroup(self._group)

    def close(self, limit_s: float) -> None:
        """Wait for its end, which was noticed or requested."""
        if self._thread is not None:
            self._thread.join(limit_s)
        if self._thread is None or not self._thread.is_alive():
            os.close(self.end)
            os.close(self._write_end)

    def reason(self) -> str:
        """Return one line that says why it failed."""
        lines = [line.strip() for line in str(self.error).splitlines()]
        # The last line of a task's traceback; else the first line that is not py4j's.
        own = [line for line in lines if ": " in line and line.split(": ")[0].rpartition(".")[2].endswith("Error")]
        spark = [line for line in lines if line.startswith(": ")]
        return [*own, *(line[2:] for line in spark), *lines, ""][0]

    def _run(self, plan: TaskPlan) -> None:
        try:
            self._context.setJobGroup(self._group, f"hvdtrain: {plan.size} ranks", True)
            tasks = self._context.parallelize(range(plan.size), plan.size).barrier()
            self.ends = tasks.mapPartitionsWithIndex(functools.partial(run_rank, plan)).collect()
        except Exception as error:  # noqa: BLE001 - py4j's and Spark's: the caller reports it
            self.error = error
        finally:
            os.write(self._write_end, b".")

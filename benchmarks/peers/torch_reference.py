"""The reference of N ranks: one process whose batch is all ranks' batches together. Not timed."""

from __future__ import annotations

from benchmarks.torch_tasks import Task, loop
from benchmarks.workloads import data_ranks

if __name__ == "__main__":
    task = Task()
    loop(task, task.optimizer(), rank=0, size=1, batch_size=task.workload.batch_size * data_ranks())

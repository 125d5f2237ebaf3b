"""One process, plain PyTorch."""

from __future__ import annotations

import os

from benchmarks.torch_tasks import Task, loop

if __name__ == "__main__":
    task = Task()
    loop(task, task.optimizer(), rank=int(os.environ.get("BENCH_COPY", "0")), size=1)

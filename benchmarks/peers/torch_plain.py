"""One process, plain PyTorch."""

from __future__ import annotations

from benchmarks.torch_tasks import Task, loop

if __name__ == "__main__":
    task = Task()
    loop(task, task.optimizer(), rank=0, size=1)

"""A plain PyTorch loop on a GPU, in bf16."""

from __future__ import annotations

from benchmarks.gpu_tasks import GpuTask, loop

if __name__ == "__main__":
    task = GpuTask()
    loop(task, task.optimizer())

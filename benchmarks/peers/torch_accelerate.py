"""Hugging Face Accelerate."""

from __future__ import annotations

from accelerate import Accelerator

from benchmarks.torch_tasks import Task, loop

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    task = Task()
    model, optimizer = accelerator.prepare(task.model, task.optimizer())
    loop(
        task,
        optimizer,
        rank=accelerator.process_index,
        size=accelerator.num_processes,
        model=model,
        backward=accelerator.backward,
    )
    accelerator.end_training()

"""Report from outside where a PyTorch step loads, goes backward and ends, for `hvdtrain bench`.

A step ends when an optimizer has stepped. Data wait is the time from there, and from each backward pass of an
accumulated step, to the next forward pass of any module. The reducer reports its waits itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdtrain.telemetry.memory import Parts, StepMemory
from hvdtrain.telemetry.step_times import StepTimes
from hvdtrain.torch.ops import gpu_clock
from hvdtrain.torch.ops.compression import Compression
from hvdtrain.torch.ops.names import parameters_of
from hvdtrain.torch.reduction.memory import held_by


def attach(times: StepTimes) -> Callable[[], None]:
    """Let every step of this process be recorded; return what detaches it."""
    times.recorder.use(gpu_clock.of_bench())
    marks = _StepMarks(times)
    backward = torch.autograd.backward
    torch.autograd.backward = marks.reported(backward)
    hook = register_optimizer_step_post_hook(marks.stepped)
    marks.expect_batch()

    def detach() -> None:
        torch.autograd.backward = backward
        hook.remove()
        marks.ignore_batch()

    return detach


class _StepMarks:
    def __init__(self, times: StepTimes) -> None:
        self._facts, self._recorder = times.facts, times.recorder
        self._hook: Any = None
        self._batch_samples = 0  # of the forward pass in progress
        self._samples = 0  # of the step in progress
        self._stepping = False  # until a torch optimizer has stepped: Keras's steps on torch are others' to mark
        self._in_backward = False
        self._memory, self._in_step = StepMemory(), False
        self._tensors: list[torch.Tensor] = []  # of the first module that was called
        self._optimizers: list[torch.optim.Optimizer] = []
        times.memory = self._parts

    def _parts(self) -> Parts | None:
        """Return what a step took at most; None before one."""
        return self._memory.parts(held_by(self._tensors, self._optimizers)) if self._optimizers else None

    def expect_batch(self) -> None:  # the next forward pass is the sign that it is there
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._forward)

    def ignore_batch(self) -> None:  # between two steps the hook would only cost time
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._recorder.ended("data")
        self.ignore_batch()
        if not self._tensors:
            self._tensors = [*module.parameters(), *module.buffers()]
            self._memory.begin(held_by(self._tensors, []))
        if not self._in_step:
            self._memory.begin_step()
            self._in_step = True
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].dim():
            self._batch_samples = len(inputs[0])

    def reported(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `backward`, with a report of each outermost call."""

        @functools.wraps(backward)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward:  # checkpointing goes backward within backward
                return backward(*args, **kwargs)
            self._in_backward = True
            self._recorder.ended("compute")
            try:
                return backward(*args, **kwargs)
            finally:
                self._recorder.ended("backward")
                self._in_backward = False
                if self._stepping:
                    self._samples, self._batch_samples = self._samples + self._batch_samples, 0
                    self.expect_batch()

        return measured

    def stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping, self._in_step = True, False
        self._memory.end_step()
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        facts = self._facts
        if self._samples:
            facts["samples_per_step"] = max(self._samples, facts.get("samples_per_step", 0))
        self._samples = 0
        if "gradient_bytes" not in facts:
            gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
            reducer = getattr(optimizer, "_hvd_reducer", None)
            compressor = Compression.none if reducer is None else reducer.options.compression
            facts |= {
                "framework": "torch",
                "gradient_bytes": sum(g.numel() * g.element_size() for g in gradients),
                "reduced": bool(reducer is not None and reducer.is_distributed),
                "wire": compressor.name or type(compressor).__name__,
            }
        self._recorder.step_done()
        self.expect_batch()

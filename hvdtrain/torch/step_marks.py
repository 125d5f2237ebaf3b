"""Where a PyTorch step begins, waits and ends: tells `hvdtrain.step_times`, attached from outside.

A step ends when an optimizer has stepped. Data wait is the time from there, and from each backward pass of an
accumulated step, to the next forward pass of any module; the backward pass is `loss.backward()`, and exposed
communication the time in `Reducer.synchronize`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdtrain.step_times import Recorder
from hvdtrain.torch.reducer import Reducer


def attach(recorder: Recorder) -> Callable[[], None]:
    """Let every step of this process be recorded; return what takes it all back."""
    marks = _Marks(recorder)
    synchronize, backward = Reducer.synchronize, torch.autograd.backward
    Reducer.synchronize = marks.timed(synchronize, recorder.waited)  # type: ignore[method-assign]
    torch.autograd.backward = marks.timed(backward, marks.went_backward)
    hook = register_optimizer_step_post_hook(marks.stepped)
    marks.expect_batch()

    def detach() -> None:
        Reducer.synchronize = synchronize  # type: ignore[method-assign]
        torch.autograd.backward = backward
        hook.remove()
        marks.ignore_batch()

    return detach


class _Marks:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._hook: Any = None
        self._ended = recorder.clock()
        self._waited_s = 0.0  # communication of the step under way when the batch before was done with
        self._held = 0  # samples of the forward pass under way
        self._samples = 0  # of the step under way
        self._stepping = False  # until a torch optimizer has stepped: Keras's steps on torch are others' to mark
        self._depth: dict[Any, int] = {}

    def expect_batch(self) -> None:
        """Take the next forward pass for the sign that a batch is there."""
        self._ended, self._waited_s = self._recorder.clock(), self._recorder.waited_s
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._forward)

    def ignore_batch(self) -> None:
        """Take the hook off again: between two steps it would only cost time."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        # Reductions since then, of a metric perhaps, are counted as what they are.
        gap = self._recorder.clock() - self._ended - (self._recorder.waited_s - self._waited_s)
        self._recorder.waited_for_data(gap)
        self.ignore_batch()
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].dim():
            self._held = len(inputs[0])

    def went_backward(self, seconds: float) -> None:
        """Count a backward pass; another batch may follow it before the step."""
        self._recorder.went_backward(seconds)
        if not self._stepping:
            return
        self._samples, self._held = self._samples + self._held, 0
        self.expect_batch()

    def timed(self, function: Callable[..., Any], add: Callable[[float], None]) -> Callable[..., Any]:
        """Return `function`, whose outermost calls are timed."""

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if self._depth.get(function):  # checkpointing goes backward within backward
                return function(*args, **kwargs)
            _finish_gpu()
            self._depth[function] = 1
            began = self._recorder.clock()
            try:
                result = function(*args, **kwargs)
                _finish_gpu()
                return result
            finally:
                add(self._recorder.clock() - began)
                self._depth[function] = 0

        return measured

    def stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """End the step."""
        _finish_gpu()
        self._stepping = True
        facts = self._recorder.facts
        if self._samples:
            facts["samples_per_step"] = max(self._samples, facts.get("samples_per_step", 0))
        self._samples = 0
        if "gradient_bytes" not in facts:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            facts["gradient_bytes"] = sum(g.numel() * g.element_size() for g in gradients)
            reducer = getattr(optimizer, "_hvd_reducer", None)
            facts["reduced"] = bool(reducer is not None and reducer.is_distributed)
            facts["wire"] = _wire(reducer)
            facts["framework"] = "torch"
        self._recorder.step_done()
        self.expect_batch()


def _wire(reducer: Any) -> str:
    """Return the name of the compression under which gradients travel: "none", "fp16", "bf16"."""
    if reducer is None:
        return "none"
    name: str = reducer.options.compression.__name__
    return {"NoneCompressor": "none", "FP16Compressor": "fp16", "BF16Compressor": "bf16"}.get(name, name)


def _finish_gpu() -> None:
    """Wait for what the GPU was given: a call that returns early has not taken that little time."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()

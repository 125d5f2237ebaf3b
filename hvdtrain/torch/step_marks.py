"""Where a PyTorch step begins, waits and ends: tells `hvdtrain.telemetry.step_times`, attached from outside.

A step ends when an optimizer has stepped. Data wait is the time from there, and from each backward pass of an
accumulated step, to the next forward pass of any module; the backward pass is `loss.backward()`, and exposed
communication the time in `Reducer.synchronize`. On a GPU that is by the host's clock, which waits at each mark for the
current stream; with HVDTRAIN_GPU_ASYNC=1 by the GPU's own. Neither has run on one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdtrain.distributed import tuning
from hvdtrain.telemetry.step_times import Recorder
from hvdtrain.torch import gpu_clock
from hvdtrain.torch.reducer import Reducer


def attach(recorder: Recorder) -> Callable[[], None]:
    """Let every step of this process be recorded; return what takes it all back."""
    marks = _GpuMarks(recorder) if torch.cuda.is_available() and tuning.gpu_async() else _Marks(recorder)
    synchronize, backward = Reducer.synchronize, torch.autograd.backward
    Reducer.synchronize = marks.timed(synchronize, marks.waited)  # type: ignore[method-assign]
    torch.autograd.backward = marks.timed(backward, recorder.went_backward)
    hook = register_optimizer_step_post_hook(marks.stepped)
    marks.expect_batch()

    def detach() -> None:
        Reducer.synchronize = synchronize  # type: ignore[method-assign]
        torch.autograd.backward = backward
        hook.remove()
        marks.ignore_batch()

    return detach


class _Marks:
    """Marks by the host's clock, before each of which the GPU is done with what it was given."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._hook: Any = None
        self._ended = self._now()
        self._waited_s = 0.0  # since the batch before was done with
        self._held = 0  # samples of the forward pass under way
        self._samples = 0  # of the step under way
        self._stepping = False  # until a torch optimizer has stepped: Keras's steps on torch are others' to mark
        self._depth: dict[Any, int] = {}

    def _now(self) -> Any:
        """Return a mark."""
        finish_gpu()
        return self._recorder.clock()

    def _tell(self, add: Callable[[float], None], began: Any) -> None:
        """Call `add` with the seconds from a mark to now."""
        add(self._now() - began)

    def _end_step(self) -> None:
        finish_gpu()
        self._recorder.step_done()

    def expect_batch(self) -> None:
        """Take the next forward pass for the sign that a batch is there."""
        self._ended = self._now()
        self._tell(self._forget_waits, self._ended)
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._forward)

    def ignore_batch(self) -> None:
        """Take the hook off again: between two steps it would only cost time."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _forget_waits(self, _: float) -> None:
        self._waited_s = 0.0

    def _got_batch(self, seconds: float) -> None:
        # Reductions in between, of a metric perhaps, are counted as what they are.
        self._recorder.waited_for_data(seconds - self._waited_s)

    def _forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._tell(self._got_batch, self._ended)
        self.ignore_batch()
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].dim():
            self._held = len(inputs[0])

    def waited(self, seconds: float) -> None:
        """Count a reduction."""
        self._waited_s += seconds
        self._recorder.waited(seconds)

    def timed(self, function: Callable[..., Any], add: Callable[[float], None]) -> Callable[..., Any]:
        """Return `function`, whose outermost calls are timed; after a backward pass, another batch may follow."""
        is_backward = function is torch.autograd.backward

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if self._depth.get(function):  # checkpointing goes backward within backward
                return function(*args, **kwargs)
            self._depth[function] = 1
            began = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                self._tell(add, began)
                self._depth[function] = 0
                if is_backward and self._stepping:
                    self._samples, self._held = self._samples + self._held, 0
                    self.expect_batch()

        return measured

    def stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """End the step."""
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
        self._end_step()
        self.expect_batch()


class _GpuMarks(_Marks):
    """Marks in the GPU's stream, told to the recorder at the end of the step after: no step waits for its own end.

    By the host's clock until the GPU is used, and where it never is.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._step: list[tuple[Callable[[float], None], gpu_clock.Mark, gpu_clock.Mark]] = []
        self._before: tuple[Any, gpu_clock.Mark] | None = None  # the step before, and its end
        self._last: gpu_clock.Mark | None = None  # the end of the last one that was told
        self._at = 0.0  # of that, seconds
        super().__init__(recorder)

    def _now(self) -> Any:
        return gpu_clock.mark() if torch.cuda.is_initialized() else self._recorder.clock()

    def _tell(self, add: Callable[[float], None], began: Any) -> None:
        ended = self._now()
        if isinstance(began, float) and isinstance(ended, float):
            add(ended - began)
        elif not isinstance(began, float):
            self._step.append((add, began, ended))

    def _end_step(self) -> None:
        if not torch.cuda.is_initialized():
            self._recorder.step_done()
            return
        before, self._before, self._step = self._before, (self._step, gpu_clock.mark()), []
        if before is None:
            return
        spans, ended = before
        ended.synchronize()
        if self._last is None:
            self._recorder.clock = lambda: self._at
            self._recorder.begin()
        else:
            self._at += gpu_clock.seconds(self._last, ended)
        for add, begin, end in spans:
            add(gpu_clock.seconds(begin, end))
        self._last = ended
        self._recorder.step_done()


def _wire(reducer: Any) -> str:
    """Return the name of the compression under which gradients travel: "none", "fp16", "bf16"."""
    if reducer is None:
        return "none"
    name: str = reducer.options.compression.__name__
    return {"NoneCompressor": "none", "FP16Compressor": "fp16", "BF16Compressor": "bf16"}.get(name, name)


def finish_gpu() -> None:
    """Wait for what the current stream was given, reductions on others left out.

    A call that returns early has not taken that little time.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()

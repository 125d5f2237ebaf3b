"""A rank's stage of a pipeline: it computes its layers, and torch's schedules pass what is between stages."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from hvdtrain.distributed import rank_state, streams
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.grid import split
from hvdtrain.torch.ops import divided, pack
from hvdtrain.torch.ops.functions import broadcast_object, broadcast_parameters

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
_KEPT = 8  # schedules, each for micro-batches of one shape: they hold buffers for what they receive

LossOf = Callable[[Any, int], Tensor]
Within = Callable[[int], AbstractContextManager[Any]]


class Stage(nn.Module):
    """The layers of one stage, with the names that they have in the whole model. `Grid.pipeline` makes it.

    `Trainer(stage, ...)` trains it; a custom loop calls `forward_backward`. All ranks of a replica call its methods,
    with the same inputs.

    Attributes:
        grid: the Grid.
        micro_batches: how many parts of a batch go through the stages one after the other.
        schedule: "1f1b" or "gpipe".
        layer_names: the names of the layers of each stage.
        layer_kinds: how many layers of each class the whole model has.
    """

    def __init__(
        self, grid: Any, layers: Mapping[str, nn.Module], *, micro_batches: int, schedule: str, at: Sequence[str]
    ) -> None:
        super().__init__()
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be {' or '.join(map(repr, SCHEDULES))}. Received: schedule={schedule!r}")
        if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
            raise ValueError(f"micro_batches must be an int >= 1. Received: micro_batches={micro_batches!r}")
        self.layer_names = split.split(layers, grid.stages, at)
        self.layer_kinds = Counter(map(type, layers.values()))
        self.grid, self.micro_batches, self.schedule = grid, micro_batches, schedule
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self.within = lambda samples: nullcontext()
        self._is_running = False
        self._loss_of: Callable[[Any, Tensor], Tensor] | None = None
        if taken := [name for name in layers if hasattr(self, name)]:
            raise ValueError(f"A stage has an attribute of this name already: rename the layer. Received: {taken[0]!r}")
        for name in self.layer_names[grid.stage]:
            self.add_module(name, layers[name])

    def describe(self) -> str:
        """Return a log line on the stages."""
        ends = [part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in self.layer_names]
        stages = ", ".join(f"{number}: {part}" for number, part in enumerate(ends))
        idle = (self.grid.stages - 1) / (self.micro_batches + self.grid.stages - 1)
        how = f"{self.micro_batches} micro-batches, {self.schedule}; a stage waits for {100 * idle:.0f} % of a step"
        return f"pipeline: layers by stage {stages}; {how}"

    @property
    def within(self) -> Within:
        """Returns a context, such as autocast's, in which the layers compute; it gets the number of samples."""
        return self._within

    @within.setter
    def within(self, within: Within) -> None:
        self._within = within
        self._schedules.clear()  # their buffers are of the types that another context may have sent

    def _apply(self, *args: Any, **kwargs: Any) -> Any:  # torch's, for to(), double() and the like: on all stages
        self._schedules.clear()
        return super()._apply(*args, **kwargs)

    @property
    def is_first(self) -> bool:
        """True for the stage that takes the inputs."""
        return bool(self.grid.stage == 0)

    @property
    def is_last(self) -> bool:
        """True for the stage that has the outputs, and computes the loss."""
        return bool(self.grid.stage == self.grid.stages - 1)

    def forward(self, inputs: Any) -> Any:
        """Compute this stage's layers, of a tensor or a tuple of them; for the schedules.

        Raises:
            HvdTrainError: called by anybody else.
        """
        if not self._is_running:
            raise HvdTrainError(
                f"A stage has a part of the model, and its output is no prediction. Received: a call of stage "
                f"{self.grid.stage} of {self.grid.stages}. Call stage.outputs(inputs) on all ranks, or the Trainer's "
                "predict"
            )
        # A layer may work in place: on a view of a batch, or where torch looks for the gradient of what was received.
        value = _each(Tensor.clone, inputs)
        for layer in self._modules.values():  # children() leaves out a layer that comes again
            assert layer is not None
            value = layer(value)
        # The gradient of an expanded tensor would be received into memory whose elements share places.
        return value if self.is_last else _each(Tensor.contiguous, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        """Return a stage of the same Grid with layers of its own, as torch's AveragedModel makes it."""
        copied = object.__new__(type(self))
        # Its schedules would compute these layers, and a context belongs to who has set it.
        memo |= {id(self): copied, id(self._schedules): OrderedDict(), id(self._within): self._within}
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the state of this stage, or of the whole model, of which it takes its own layers."""
        stages = enumerate(self.layer_names)
        others = {name for stage, names in stages if stage != self.grid.stage for name in names}
        own = OrderedDict(item for item in state_dict.items() if item[0].partition(".")[0] not in others)
        if hasattr(state_dict, "_metadata"):  # the versions of its layers' states
            setattr(own, "_metadata", state_dict._metadata)  # noqa: B010 - an OrderedDict declares none
        return super().load_state_dict(own, *args, **kwargs)

    def forward_backward(self, inputs: Tensor, loss_of: Callable[[Any, slice], Tensor]) -> None:
        """Compute the gradients of a batch in micro-batches, and add them to the parameters'. A collective.

        Args:
            inputs: of the whole model, shape (samples, ...), on every stage.
            loss_of: called on the last stage, with the outputs of a micro-batch and its rows in the batch; returns what
                is differentiated. The gradients of micro-batches add up: for a mean over the batch, multiply the mean
                of a micro-batch by its part of the rows.

        Raises:
            TypeError: inputs are not one tensor.
        """
        check_inputs(inputs)
        rows = self._rows(len(inputs))
        self.run([inputs[each] for each in rows], lambda outputs, index: loss_of(outputs, rows[index]))

    def run(self, inputs: Sequence[Tensor], loss_of: LossOf) -> None:
        """Compute the gradients of micro-batches, as `forward_backward`; `loss_of` gets the number of each.

        Micro-batches of one size go through the stages together.
        """
        for members in _of_one_shape(inputs):
            self._loss_of = lambda outputs, index, members=members: loss_of(outputs, members[int(index)])
            try:
                self._go(torch.cat([inputs[index] for index in members]), len(members), trains=True)
            finally:
                self._loss_of = None

    @torch.no_grad()
    def outputs(self, inputs: Tensor) -> Any:
        """Return the model's outputs on the last stage, None on others, without gradients. A collective."""
        check_inputs(inputs)
        rows = self._rows(len(inputs))
        found: dict[int, Any] = {}
        parts = [inputs[each] for each in rows]
        for members in _of_one_shape(parts):
            merged = self._go(torch.cat([parts[index] for index in members]), len(members), trains=False)
            if self.is_last:
                length = len(parts[members[0]])
                for place, index in enumerate(members):
                    found[index] = _rows(merged, slice(place * length, (place + 1) * length))
        return _joined([found[index] for index in range(len(parts))]) if self.is_last else None

    def shared(self, outputs: Any) -> Any:
        """Return the last stage's outputs, a tensor or a tuple of them, on all stages. A collective."""
        root, group = self.grid.rank_of(stage=self.grid.stages - 1), self.grid.stages_set
        several = isinstance(outputs, tuple)
        tensors = [] if outputs is None else list(outputs) if several else [outputs]
        mine = [(each.shape, each.dtype) for each in tensors]
        several, kinds = broadcast_object((several, mine), root, "grid.outputs", group)
        if not self.is_last:
            tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in kinds]
        tensors = [each.contiguous() for each in tensors]
        broadcast_parameters([(f"grid.output.{index}", each) for index, each in enumerate(tensors)], root, group)
        return tuple(tensors) if several else tensors[0]

    def _rows(self, count: int) -> list[slice]:
        """Return the rows of the micro-batches of so many samples; there may be fewer than `micro_batches`."""
        ends = [count * part // self.micro_batches for part in range(self.micro_batches + 1)]
        return [slice(first, end) for first, end in pairwise(ends) if first < end]

    @property
    def _device(self) -> torch.device:
        return torch.device(self.grid.world.device)

    def _go(self, inputs: Tensor, count: int, *, trains: bool) -> Any:
        """Let `count` micro-batches of one size go through the stages; return the outputs unless it `trains`."""
        with self._running(), self._own_numbers(advances=trains):
            schedule = self._schedule(inputs, count, trains=trains)
            args = (inputs,) if self.is_first else ()
            # Numbers in the place of targets: the loss of a micro-batch needs more than its targets.
            target = torch.arange(count, dtype=torch.int64, device="cpu") if trains and self.is_last else None
            return schedule.step(*args, target=target, return_outputs=not trains)

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    @contextmanager
    def _own_numbers(self, *, advances: bool) -> Iterator[None]:
        """Within it, layers draw numbers of this stage's own; afterwards torch's generator has given one number.

        Data may draw from that generator too, and gives the first stage the inputs and the last one their targets: if
        a stage's dropout moved it, stages would have different samples. Stages that draw alike would drop alike. The
        generators of Python and NumPy are as before: data draw from them too, and so may layers.
        """
        with nullcontext() if advances else torch.random.fork_rng([]):
            seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu")) + int(self.grid.stage)
        with self._numbers_restored():
            torch.manual_seed(seed)
            streams.reseed(dict.fromkeys(streams.generators_in(rank_state.random_states()), seed))
            yield

    @contextmanager
    def _numbers_restored(self) -> Iterator[None]:
        with torch.random.fork_rng(self._devices), rank_state.random_states_restored():
            yield

    @property
    def _devices(self) -> list[torch.device]:
        return [self._device] if self._device.type == "cuda" else []

    def _schedule(self, inputs: Tensor, count: int, *, trains: bool) -> Any:
        """Return torch's schedule for so many micro-batches of this shape."""
        length = len(inputs) // count
        device = self._device.type
        cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)  # the script's own, around a step
        key = (length, *inputs.shape[1:], inputs.dtype, count, trains, self.training, cast)
        if key in self._schedules:
            self._schedules.move_to_end(key)
            return self._schedules[key]
        grid = self.grid
        received, is_tuple, sent = self._shapes(inputs[:length])
        stage = PipelineStage(
            _Computed(self, length, is_tuple), grid.stage, grid.stages, self._device,
            input_args=received, output_args=sent, group=grid.group("stage"),
        )  # fmt: skip
        kind = SCHEDULES[self.schedule] if count >= grid.stages and trains else ScheduleGPipe
        loss = self._compute_loss if trains else None
        self._schedules[key] = kind(stage, count, loss_fn=loss, scale_grads=False)
        while len(self._schedules) > _KEPT:
            self._schedules.popitem(last=False)
        return self._schedules[key]

    def _compute_loss(self, outputs: Any, index: Tensor) -> Tensor:
        assert self._loss_of is not None
        return self._loss_of(outputs, index)

    def _shapes(self, sample: Tensor) -> tuple[tuple[Tensor, ...], bool, tuple[Tensor, ...]]:
        """Return tensors like those that this stage receives, whether in a tuple, and sends; a collective.

        torch would find the shapes by itself, and change BatchNorm's statistics by what is in empty memory. All numbers
        that can have a gradient get one: a stage would not learn that another one's layers are frozen no more.

        Raises:
            TypeError: on all stages, if one returns something else.
        """
        grid: Any = self.grid
        described: list[Any] = []
        refused = ""
        is_tuple = takes_tuple = False  # one tensor in a tuple is not a tensor
        received: tuple[Tensor, ...] = (sample.detach(),)
        sent: tuple[Tensor, ...] = ()
        for stage in range(grid.stages):
            if stage == grid.stage:
                if stage:
                    takes_tuple = is_tuple
                    zeros = [torch.zeros(shape, dtype=dtype, device=self._device) for shape, dtype in described]
                    received = tuple(map(_passed, zeros))
                with self._unchanged():
                    outputs = _Computed(self, len(sample), takes_tuple)(*received)
                is_tuple = isinstance(outputs, tuple)
                sent = outputs if is_tuple else (outputs,)
                refused = self._refusal(sent)
                described = [] if refused else [(tuple(each.shape), each.dtype) for each in sent]
            root = grid.rank_of(stage=stage)
            found = (is_tuple, described, refused)
            is_tuple, described, refused = broadcast_object(found, root, "grid.shapes", grid.stages_set)
            if refused:
                raise TypeError(refused)
        return received, takes_tuple, tuple(map(_passed, sent))

    def _refusal(self, sent: tuple[Any, ...]) -> str:
        """Return the error's message if a stage cannot return this; else nothing."""
        parts = not self.is_last and any(map(divided.is_divided, sent))
        if all(isinstance(each, Tensor) for each in sent) and not parts:
            return ""
        kinds, layer = ", ".join(type(each).__name__ for each in sent), self.layer_names[self.grid.stage][-1]
        if parts:
            what_to_do = "Do not pass use_local_output=False for this layer in the plan of parallelize_module"
        elif self.is_last:
            what_to_do = "Let it return a tensor, or a tuple of tensors"
        else:
            what_to_do = "Divide the model at another layer, by at="
        return (
            f"Stages return tensors, or tuples of them. Received: {kinds} from {layer}, the last layer of stage "
            f"{self.grid.stage}. {what_to_do}"
        )

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Within it, what the layers draw and their buffers do not change."""
        saved = [(buffer, buffer.detach().clone()) for buffer in self.buffers()]
        with self._numbers_restored():
            yield
        with torch.no_grad():
            for buffer, before in saved:
                buffer.copy_(before)


class _Computed(nn.Module):
    """A stage with micro-batches of one size, in the context of the stage; torch unpacks a tuple."""

    def __init__(self, stage: Stage, samples: int, is_tuple: bool) -> None:
        super().__init__()
        self._held = (stage, samples, is_tuple)  # in a tuple: no submodule, for torch moves those to the device

    def forward(self, *inputs: Any) -> Any:
        stage, samples, is_tuple = self._held
        try:
            with stage.within(samples):
                return stage(inputs if is_tuple else inputs[0])
        finally:
            if stage.grid.shards > 1:  # a script's own autocast keeps casts, and fully_shard gathers again
                torch.clear_autocast_cache()


def _of_one_shape(inputs: Sequence[Tensor]) -> list[list[int]]:
    """Return the numbers of the inputs of each shape, in order."""
    return pack.alike(range(len(inputs)), lambda index: inputs[index].shape)


def _passed(tensor: Tensor) -> Tensor:
    """Return a tensor like one that goes between stages, in training with a gradient if it can have one."""
    trains = torch.is_grad_enabled() and (tensor.is_floating_point() or tensor.is_complex())
    return tensor.detach().requires_grad_(trains)


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to a tensor, or to the tensors of a tuple; what else there is stays."""
    if isinstance(value, tuple):
        return tuple(_each(function, each) for each in value)
    return function(value) if isinstance(value, Tensor) else value


def _rows(outputs: Any, rows: slice) -> Any:
    return tuple(each[rows] for each in outputs) if isinstance(outputs, tuple) else outputs[rows]


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(map(torch.cat, zip(*parts, strict=True)))
    return torch.cat(list(parts))


def check_inputs(inputs: Any) -> None:
    """Raise TypeError unless the inputs are one tensor with rows."""
    if not isinstance(inputs, Tensor) or not inputs.dim() or not len(inputs):
        raise TypeError(
            "A pipeline takes inputs that are one tensor, with a row for each sample. Put several inputs into one, and "
            "let the first layer take them apart. Received: "
            f"{type(inputs).__name__}{f' of shape {tuple(inputs.shape)}' if isinstance(inputs, Tensor) else ''}"
        )

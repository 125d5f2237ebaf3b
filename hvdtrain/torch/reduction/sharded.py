"""Optimizer state in shards: each rank holds 1/N of it, and updates 1/N of every weight.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1. Gradients are
reduced as without shards, or `scattered`. Then each rank steps with its part of each weight, and all ranks gather the
weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.distributed import agreement
from hvdtrain.distributed.launch_environment import count_ranks
from hvdtrain.distributed.recorder import recorder
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.engine import Sum
from hvdtrain.torch.ops.functions import allgather_object, broadcast_object
from hvdtrain.torch.ops.gather_ops import allgather_async, alltoall_async, broadcast_async_
from hvdtrain.torch.ops.names import parameters_of
from hvdtrain.torch.ops.submit import Reduction, submit
from hvdtrain.torch.reduction.division import Division, flat, flat_gradient, laid_out
from hvdtrain.torch.reduction.publish import publish
from hvdtrain.torch.reduction.shardable import check_class, check_memory
from hvdtrain.torch.reduction.tensors import Whole
from hvdtrain.torch.reduction.unread import Unread, as_read, room

# One number for a whole weight, in the state of torch's optimizers.
_COUNTS = frozenset({"step", "eta", "mu", "mu_product"})

_STALE = (
    "The optimizer's state is in shards, and this rank holds a part of earlier ranks: an elastic job has others now. "
    "Give the optimizer to hvd.elastic.TorchState, whose sync() divides the last commit among ranks. Received: "
    "{ranks}, on rank {rank}."
)

Entries = dict[str, Any]  # the state of one weight, by name


class Shards(Whole):
    """The state of one optimizer over the ranks of a process set, and the step that each rank takes with its shard.

    Within `stepping`, parameter groups hold this rank's part of each weight, flat. The state in `optimizer.state` is
    that of the parts, under the whole weight. State that was loaded is whole until the next step or `spread`.

    Attributes:
        gradients: this rank's parts of the gradients of this step that are not whole, perhaps with zeros at the end.
        division: the parts of the present ranks.
        rank: this process's, in the process set.
        is_stale: True if this rank's parts are those of an elastic job's earlier ranks.

    Args:
        optimizer: a plain one.
        process_set: its ranks; the first one is the root of what is gathered by default.

    Raises:
        ValueError: its class is not known to be element-wise; or a weight has gaps in memory.
    """

    are_parts = True

    def __init__(self, optimizer: torch.optim.Optimizer, process_set: Any) -> None:
        check_class(optimizer)
        self._optimizer, self.process_set = optimizer, process_set
        self._note_ranks()
        check_memory(parameters_of(optimizer))
        # Whole states, of loaded or initial entries; None once each rank holds its part only.
        self._whole: dict[Parameter, Entries] | None = None
        self._gathered: dict[int, Entries] | None = None
        self._parts: list[tuple[Parameter, Tensor]] | None = None  # within `stepping`: each weight and its part
        self.gradients: dict[Parameter, Tensor] = {}
        self._layouts: dict[Parameter, tuple[int, ...]] = {}  # strides of the weights whose parts have state
        self._take_whole()
        optimizer.register_state_dict_pre_hook(self._require_gathered)
        optimizer.register_state_dict_post_hook(self._with_gathered)
        optimizer.register_load_state_dict_post_hook(lambda _: self._take_whole())

    # Ranks

    def _note_ranks(self) -> None:
        self._generation = engine.generation
        self.division, self.rank = Division(self.process_set.size()), self.process_set.rank()

    def follow_ranks(self) -> None:
        """Divide by the present ranks from now on: an elastic job may have other ones than before.

        Parts of the state are then those of earlier ranks, until others are loaded.
        """
        if self._generation != engine.generation:
            before = self.division, self.rank
            self._note_ranks()
            self.gradients.clear()
            has_parts = self._whole is None and bool(self._optimizer.state)
            self.is_stale |= has_parts and before != (self.division, self.rank)

    def _check_ranks(self) -> None:
        if self.is_stale:
            raise HvdTrainError(_STALE.format(rank=self.rank, ranks=count_ranks(self.division.size)))

    # Steps

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Within it, the optimizer has this rank's part of each weight, of its gradient and of its state.

        Raises:
            HvdTrainError: a weight that has state is in another order in memory than when the state was made.
        """
        if self.is_stepping:
            yield
            return
        self._gathered = None
        self.adopt()
        self._check_layouts()
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        divided = [[self._part_of(p) for p in params] for params in whole]
        self._parts = [pair for pairs in zip(whole, divided, strict=True) for pair in zip(*pairs, strict=True)]
        try:
            self._put_into_groups(divided)
            yield
        finally:
            self._put_into_groups(whole)
            self._parts = None

    @contextmanager
    def whole_groups(self) -> Iterator[None]:
        """Within it, the optimizer has whole weights also in the block of `stepping`; its state is that of parts."""
        divided = [group["params"] for group in self._optimizer.param_groups]
        weights = iter([parameter for parameter, _ in self._parts or ()])
        self._put_into_groups([[next(weights) for _ in parts] for parts in divided])
        try:
            yield
        finally:
            self._put_into_groups(divided)

    def _put_into_groups(self, tensors: list[list[Any]]) -> None:
        """Let groups hold these tensors, parts or whole weights, and the state be known by them."""
        state = self._optimizer.state
        for group, mine in zip(self._optimizer.param_groups, tensors, strict=True):
            for before, after in zip(group["params"], mine, strict=True):
                if before in state:
                    state[after] = state.pop(before)
            group["params"] = mine

    def _check_layouts(self) -> None:
        """Refuse weights that have another order in memory now: `p.data = ...`, `model.to(memory_format=...)`."""
        for parameter in self.parameters:
            if self._layouts.get(parameter) == parameter.stride():
                continue
            check_memory([parameter])
            if parameter in self._layouts and self._optimizer.state.get(parameter):
                raise HvdTrainError(
                    "The optimizer's state is in shards, and a weight now lies in another order in memory. Received: "
                    f"shape {tuple(parameter.shape)}, strides {self._layouts[parameter]} and then "
                    f"{parameter.stride()}, on rank {self.rank}. Lay it out before the first step, or, on every rank, "
                    "call optimizer.consolidate_state_dict(to=None) before and "
                    "optimizer.load_state_dict(optimizer.state_dict()) after."
                )
            self._layouts[parameter] = parameter.stride()

    @property
    def is_stepping(self) -> bool:
        """True within `stepping`."""
        return self._parts is not None

    def publish(self) -> None:
        """Within `stepping`, give all ranks the parts of the weights that were updated; a collective."""
        stepped = [p for p, part in self._parts or [] if part.grad is not None]
        if self.division.size > 1:
            with recorder.waiting():
                publish(stepped, self.division, self.process_set)
        torch.autograd.graph.increment_version(stepped)

    def _part_of(self, parameter: Parameter) -> Tensor:
        """Return this rank's part of a weight, with its part of the gradient.

        It may be empty. With a part of each weight on each rank, all ranks choose the same kernels for a group.
        """
        begin, end = self.division.bounds(parameter.numel(), self.rank)
        part = flat(parameter.detach())[begin:end]
        if parameter in self.gradients:
            part.grad = self.gradients[parameter][: end - begin]
        elif parameter.grad is not None:
            part.grad = flat_gradient(parameter, parameter.grad)[begin:end]
        return part

    # What is asked of all numbers of the gradients, of which each rank has its parts

    def are_finite(self, finite: bool) -> bool:
        """Return whether the gradients of all ranks' parts are finite; a collective."""
        return not self._sum(torch.tensor([float(not finite)], dtype=torch.float32, device="cpu"))

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of the gradients of all ranks' parts; a collective."""
        return self._sum(norm.double().square()).sqrt().to(norm.dtype)

    def add_up(self, number: Tensor) -> None:
        """Replace a number by its sum over ranks; a collective."""
        number.copy_(self._sum(number.clone()))

    def first(self, index: int | None, name_of: Callable[[int], str]) -> str | None:
        """Return the name of the smallest of the ranks' indices; a collective."""
        found = allgather_object(index, "shards.first", self.process_set)
        return super().first(min((each for each in found if each is not None), default=None), name_of)

    def _sum(self, number: Tensor) -> Tensor:
        how = Reduction(Sum, process_set=self.process_set)
        (total,) = submit([number], how, "shards.sum", in_place=True).wait()
        return cast(Tensor, total)

    # State

    def _take_whole(self) -> None:
        """Move whole states away from the optimizer, which from now on holds those of parts."""
        state: dict[Any, Entries] = self._optimizer.state
        self._whole, self._gathered, self.is_stale = dict(state), None, False
        state.clear()

    def load(self, entries: dict[int, Entries]) -> None:
        """Replace the state by whole ones, by the place of the weight; tensors may be on the host, or `Unread`."""
        params = self.parameters
        self._optimizer.state.clear()
        self._whole, self._gathered = {params[index]: each for index, each in entries.items()}, None
        self.is_stale = False

    def adopt(self) -> None:
        """Keep this rank's parts of whole states.

        Raises:
            HvdTrainError: the parts are those of an elastic job's earlier ranks.
        """
        self.follow_ranks()
        self._check_ranks()
        if self._whole is None:
            return
        whole, self._whole = self._whole, None
        self._layouts.clear()
        for parameter, entries in whole.items():
            for name, value in entries.items():
                self._keep(parameter, name, value)

    @property
    def parameters(self) -> list[Parameter]:
        """The optimizer's weights, in the order of its groups."""
        return parameters_of(self._optimizer)

    def parts(self) -> Iterator[tuple[int, str, Any, bool]]:
        """Yield this rank's state: the place of the weight, an entry's name and value, and True if it is a part."""
        for index, parameter in enumerate(self.parameters):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                yield index, name, value, isinstance(value, Tensor) and name not in _COUNTS and value.dim() == 1

    def put_parts(self, parts: Iterable[tuple[int, str, Any]]) -> None:
        """Replace the state by this rank's parts; each is the place of the weight, an entry's name and value."""
        params = self.parameters
        self._layouts.clear()
        self._optimizer.state.clear()
        self._whole, self._gathered, self.is_stale = None, None, False
        for index, name, value in parts:
            self._optimizer.state[params[index]][name] = value

    def _keep(self, parameter: Parameter, name: str, value: Any) -> None:
        """Keep this rank's part of one entry of a whole state."""
        begin, end = self.division.bounds(parameter.numel(), self.rank)
        if _is_divided(name, value, parameter):
            value = flat(laid_out(parameter, as_read(value)))[begin:end].to(parameter.device, copy=True)
        self._optimizer.state[parameter][name] = value

    def spread(self, root_rank: int) -> None:
        """Divide the root's whole state among ranks; if it holds a part only, so does each rank. A collective.

        Args:
            root_rank: among all ranks.

        Raises:
            CheckpointError: on the root, if it cannot read the state; an OtherRankError on the other ranks.
        """
        self.follow_ranks()
        params, is_root = self.parameters, engine.native().rank() == root_rank
        places = {parameter: index for index, parameter in enumerate(params)}
        described = None
        if is_root and self._whole is not None:
            described = [
                (places[parameter], name, (tuple(value.shape), value.dtype) if divided else value, divided)
                for parameter, entries in self._whole.items()
                for name, value in entries.items()
                for divided in [_is_divided(name, value, parameter)]
            ]
        described = broadcast_object(described, root_rank, "shards.state", self.process_set)
        if described is not None:
            self._layouts.clear()
            self._optimizer.state.clear()
            self.is_stale = False
        error: Exception | None = None
        for index, name, value, divided in described or ():
            if divided:
                shape, dtype = value
                value = None
                if is_root and error is None:
                    try:
                        value = as_read((self._whole or {})[params[index]][name]).cpu().contiguous()
                    except Exception as caught:  # noqa: BLE001 - the other ranks wait
                        error = caught
                value = room(shape, dtype) if value is None else value
                broadcast_async_(value, root_rank, "shards.entry", self.process_set).wait()
            self._keep(params[index], name, value)
        if described is not None:
            # If a rank has died before it, the root divides the state again.
            agreement.raise_on_all(
                error,
                root_rank=root_rank,
                broadcast=lambda text: broadcast_object(text, root_rank, "shards.error", self.process_set),
            )
        self._whole = self._gathered = None

    def gather(self, to: int | None) -> None:
        """Gather the state for `state_dict`, until the next step; a collective.

        Args:
            to: the rank of the process set that gets it, on its host; None: all ranks.
        """
        found: dict[int, Entries] = {}
        for index, entries in self.describe().items():
            for name, value in entries.items():
                is_divided = isinstance(value, Tensor) and value.is_meta
                whole = self.whole(index, name, value.dtype, to) if is_divided else value
                if to in (None, self.rank):
                    found.setdefault(index, {})[name] = whole
        self._gathered = found if to in (None, self.rank) else None

    def describe(self) -> dict[int, Entries]:
        """Return the whole state by the weight's place, with entries in parts on the device "meta"; a collective."""
        self.spread(self.process_set.ranks[0] if self.process_set.ranks else 0)
        self._check_layouts()
        params, mine = self.parameters, None
        if self.rank == 0:  # it has the first part of each weight
            mine = [
                (index, name, value.dtype if is_part else value, is_part)
                for index, name, value, is_part in self.parts()
            ]
        found: dict[int, Entries] = {}
        for index, name, value, divided in allgather_object(mine, "shards.names", self.process_set)[0]:
            like = torch.empty_like(params[index], dtype=value, device="meta") if divided else value
            found.setdefault(index, {})[name] = like
        return found

    def whole(self, index: int, name: str, dtype: torch.dtype, to: int | None) -> Tensor | None:
        """Gather one entry of `describe` that ranks hold in parts, on the host of the rank `to`; a collective.

        Args:
            index: the place of the weight.
            name: of the entry.
            dtype: the entry's.
            to: see `gather`.

        Returns:
            A tensor with the weight's shape and strides; None on other ranks.
        """
        self._check_ranks()
        parameter = self.parameters[index]
        own = self._optimizer.state.get(parameter, {}).get(name)
        sent = torch.empty(0, dtype=dtype, device="cpu") if own is None else own.cpu()
        if to is None:
            received = allgather_async(sent, "shards.part", self.process_set).wait()
        else:
            splits = [len(sent) if rank == to else 0 for rank in range(self.division.size)]
            received, _ = alltoall_async(sent, splits, "shards.part", self.process_set).wait()
            if to != self.rank:
                return None
        return cast(Tensor, received.as_strided(parameter.shape, parameter.stride()))

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within it, the optimizer has no state."""
        held = self._optimizer.state, self._whole, self._gathered
        self._optimizer.state, self._whole, self._gathered = defaultdict(dict), {}, None
        try:
            yield
        finally:
            self._optimizer.state, self._whole, self._gathered = held

    @property
    def is_gathered(self) -> bool:
        """True if `state_dict` returns the whole state on this rank."""
        return self._gathered is not None or self._whole is not None or not self._optimizer.state

    def _require_gathered(self, _: torch.optim.Optimizer) -> None:
        if not self.is_gathered:
            raise RuntimeError(
                "The optimizer's state is in shards: each rank holds a part. On every rank, call "
                "optimizer.consolidate_state_dict(to=0) before rank 0 calls optimizer.state_dict(). "
                f"Received: state_dict() on rank {engine.native().rank()}."
            )

    def _with_gathered(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        places = {parameter: index for index, parameter in enumerate(parameters_of(optimizer))}
        whole = self._gathered
        if whole is None:
            whole = {
                places[parameter]: {name: as_read(value) for name, value in entries.items()}
                for parameter, entries in (self._whole or {}).items()
            }
        return {**state_dict, "state": whole}


def _is_divided(name: str, value: Any, parameter: Tensor) -> bool:
    """Return whether an entry of a whole state has a number for each of the weight's."""
    return isinstance(value, Tensor | Unread) and value.shape == parameter.shape and name not in _COUNTS

"""A torch model's weights and optimizer state in flat tensors, which ranks that step alone average now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from hvdtrain import adapter
from hvdtrain.data.trees import as_array
from hvdtrain.distributed.data_ranks import PartRanks
from hvdtrain.distributed.gradient_memory import CHANGE
from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops import divided, engine, pack
from hvdtrain.torch.ops.compression import resolve
from hvdtrain.torch.ops.names import parameters_of
from hvdtrain.torch.ops.submit import Reduction
from hvdtrain.torch.ops.wire import as_real
from hvdtrain.torch.reduction.gradient_exchange import GradientExchange

Optimizers = Mapping[str, tuple[Any, Any]]  # optimizer and precision scaler by name; a single one has the name ""
_SCALE = ("scale", "_growth_tracker")  # of a GradScaler's state


class Changes:
    """Sends changes of weights in the form that a compressor with a memory gives them.

    Args:
        names: of the model's parameters.
        compression: as `resolve` takes it.
    """

    def __init__(self, names: Mapping[Parameter, str], compression: str) -> None:
        # Other names than those of the gradients, whose errors are of synchronous steps.
        self._names = {parameter: f"{CHANGE}{name}" for parameter, name in names.items()}
        self.compressor = resolve(compression).bind(list(self._names.values()))

    def mean(
        self, changes: Sequence[Tensor], parameters: Sequence[Parameter], how: Reduction, name: str
    ) -> Callable[[], list[Tensor]]:
        """Start to average flat `changes` of these parameters; return a function that waits for the means."""
        groups = pack.alike(parameters, lambda each: _kind(as_real(each.detach())))
        parts = []
        for change, same in zip(changes, groups, strict=True):
            parts += pack.parts(change, [as_real(each.detach()).shape for each in same])
        names = [self._names[each] for same in groups for each in same]
        exchange = GradientExchange(parts, how, name=name, compressor=self.compressor, names=names)

        def wait() -> list[Tensor]:
            for part, mean in zip(parts, exchange.wait(), strict=True):
                part.copy_(mean)
            self.compressor.commit()  # ranks never refuse an exchange of weights
            return list(changes)

        return wait


class WeightAccess:
    """See `hvdtrain.adapter.WeightAccess`. Weights in half precision are averaged in float32."""

    def __init__(
        self, optimizers: Optimizers, world: World, changes: Changes, only: Sequence[Parameter] | None = None
    ) -> None:
        self._optimizers, self._world, self._changes, self._only = optimizers, world, changes, only

    def agree(self) -> None:
        """Give all ranks the same entries of optimizer state; counters become the largest, loss scales the smallest."""
        parameters = [(each, p) for each, _ in self._optimizers.values() for p in _trained(each)]
        scalers = [scaler for _, scaler in self._optimizers.values() if scaler.is_enabled()]
        has_state = np.array([bool(optimizer.state.get(p)) for optimizer, p in parameters], np.float64)
        scales = [-scaler.state_dict()[name] for scaler in scalers for name in _SCALE]
        mine = np.array([*has_state, *-has_state, *scales], np.float64)
        found = PartRanks(self._world).allreduce(mine, "max", name="weights")
        anywhere, nowhere_missing = found[: len(parameters)], -found[len(parameters) : 2 * len(parameters)]
        self._add_missing(parameters, np.flatnonzero(anywhere != nowhere_missing).tolist())
        agreed = iter(found[2 * len(parameters) :].tolist())
        for scaler in scalers:
            scale, growth = -next(agreed), -next(agreed)
            scaler.load_state_dict(scaler.state_dict() | dict(zip(_SCALE, (scale, int(growth)), strict=True)))
        self._agree_on_counters()

    def _add_missing(self, parameters: Sequence[tuple[Any, Parameter]], lacking: list[int]) -> None:
        """Add the state of parameters that only other ranks have trained, as entries of zeros."""
        if not lacking:
            return
        mine = {str(i): _described(*parameters[i]) for i in lacking if parameters[i][0].state.get(parameters[i][1])}
        everyones = PartRanks(self._world).allgather_object(mine, name="access.entries")
        known = {number: entries for each in reversed(everyones) for number, entries in each.items()}
        for number in (i for i in lacking if str(i) not in mine):
            optimizer, parameter = parameters[number]
            optimizer.state[parameter] = _zeros(known[str(number)], parameter)

    def _agree_on_counters(self) -> None:
        counters = list(self._counters())
        if not counters:
            return
        mine = np.array([float(state[name]) for state, name in counters])
        largest = PartRanks(self._world).allreduce(mine, "max", name="access.counters").tolist()
        for (state, name), value in zip(counters, largest, strict=True):
            if isinstance(state[name], Tensor):
                state[name].fill_(value)
            else:
                state[name] = type(state[name])(value)

    def parts(self, number: int) -> list[adapter.WeightAccess]:
        """Return replicas of parts of the weights, in their order."""
        parameters = self._parameters()
        if not parameters:  # all of this rank's part of a model is frozen
            return [self] * number
        ends = np.cumsum([p.numel() for p in parameters])
        places = np.minimum((ends - 1) * number // ends[-1], number - 1).tolist()
        members = [[p for p, place in zip(parameters, places, strict=True) if place == part] for part in range(number)]
        return [WeightAccess(self._optimizers, self._world, self._changes, only) for only in members]

    def identities(self) -> list[int]:
        """Return which weights these are."""
        return [id(p) for p in self._parameters()]

    def weights(self) -> list[Tensor]:
        """Return the weights that are trained, flat."""
        return _flat(self._weights())

    def set_weights(self, arrays: Sequence[Tensor]) -> None:
        """Replace them."""
        _unflatten(arrays, self._weights())

    def moments(self) -> list[Tensor]:
        """Return momentum, Adam's averages and the like, flat."""
        return _flat(self._moments())

    def set_moments(self, arrays: Sequence[Tensor]) -> None:
        """Replace them."""
        _unflatten(arrays, self._moments())

    def mean(self, arrays: Sequence[Tensor], *, name: str, compression: str) -> Callable[[], list[Tensor]]:
        """Start to average over the ranks that hold these weights."""
        ranks = engine.global_set(self._world.part_set)
        how, compressor = Reduction(engine.Average, process_set=ranks), resolve(compression)
        if compressor.has_memory:
            finish = self._changes.mean(arrays, self._parameters(), how, name)
        else:
            finish = GradientExchange(arrays, how, name=name, compressor=compressor).wait

        def wait() -> list[Tensor]:
            with recorder.waiting():
                return finish()

        return wait

    def to_host(self, array: Tensor) -> NDArray[Any]:
        """Return it as an array of NumPy's."""
        return as_array(array)

    def from_host(self, array: NDArray[Any], like: Tensor) -> Tensor:
        """Return it as a tensor like another one."""
        return torch.from_numpy(array.copy()).to(like)

    def _parameters(self) -> Sequence[Parameter]:
        if self._only is not None:
            return self._only
        return [p for optimizer, _ in self._optimizers.values() for p in _trained(optimizer)]

    def _weights(self) -> list[Tensor]:
        return [as_real(divided.local(p.detach())) for p in self._parameters()]

    def _entries(self) -> Iterator[tuple[Parameter, dict[str, Any], str]]:
        for optimizer, _ in self._optimizers.values():
            for parameter in _trained(optimizer):
                state = optimizer.state.get(parameter, {})
                yield from ((parameter, state, name) for name in sorted(state))

    def _moments(self) -> list[Tensor]:
        entries = self._entries()
        moments = (state[name] for parameter, state, name in entries if _is_moment(parameter, name, state[name]))
        return [as_real(divided.local(each)) for each in moments]

    def _counters(self) -> Iterator[tuple[dict[str, Any], str]]:
        for parameter, state, name in self._entries():
            value = state[name]
            if value is None or _is_moment(parameter, name, value):
                continue
            if not (_is_number(value) or (isinstance(value, Tensor) and not value.dim())):
                raise ValueError(
                    f"Ranks cannot average what this optimizer keeps for a weight. Received: {name} of type "
                    f"{value.dtype if isinstance(value, Tensor) else type(value).__name__} on rank "
                    f"{self._world.rank}. Use another optimizer, or synchronize in every step (sync=None)."
                )
            yield state, name


def _trained(optimizer: Any) -> list[Parameter]:
    return [p for p in parameters_of(optimizer) if p.requires_grad]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_moment(parameter: Parameter, name: str, value: Any) -> bool:
    """Return whether an entry has a value for each weight, or for rows of them; a scalar weight has scalars of both."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return value.dim() > 0 or (parameter.dim() == 0 and name != "step")


def _described(optimizer: Any, parameter: Parameter) -> dict[str, Any]:
    """Return the entries of a parameter's state as JSON: a tensor's shape, type and place, or a number."""
    return {
        name: [[*value.shape], str(value.dtype).removeprefix("torch."), value.device == parameter.device]
        if isinstance(value, Tensor)
        else (0 * value if _is_number(value) else None)
        for name, value in optimizer.state[parameter].items()
    }


def _zeros(entries: dict[str, Any], parameter: Parameter) -> dict[str, Any]:
    """Return state with these entries, all of them zero."""
    return {name: _zero(each, parameter) if isinstance(each, list) else each for name, each in entries.items()}


def _zero(described: list[Any], parameter: Parameter) -> Tensor:
    """Return zeros, divided as the parameter if they are of its shape."""
    shape, dtype, is_beside = described
    kind = getattr(torch, dtype)
    if divided.is_divided(parameter) and shape == [*parameter.shape]:
        return torch.zeros_like(parameter, dtype=kind, requires_grad=False)
    return torch.zeros(shape, dtype=kind, device=parameter.device if is_beside else torch.device("cpu"))


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the type in which a tensor travels: its own, float32 for a half."""
    return tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else torch.float32


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return _wide(tensor), tensor.device


def _groups(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return pack.alike(tensors, _kind)


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [pack.flat(same, _wide(same[0])) for same in _groups(tensors)]


def _unflatten(arrays: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for array, same in zip(arrays, _groups(tensors), strict=True):
            for tensor, part in zip(same, pack.parts(array, [each.shape for each in same]), strict=True):
                tensor.copy_(part)

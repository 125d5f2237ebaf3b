"""DistributedOptimizer: the user's optimizer, with gradients reduced over ranks before each step."""

from __future__ import annotations

import copyreg
import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import Parameter

from hvdtrain.distributed import launch_environment, watchdog
from hvdtrain.distributed.agreement import first_difference
from hvdtrain.distributed.world import refuse_grid
from hvdtrain.errors import DesyncError
from hvdtrain.torch.ops import dtypes, engine, lazy, names
from hvdtrain.torch.ops.compression import Compression, resolve
from hvdtrain.torch.ops.engine import Adasum, Average
from hvdtrain.torch.ops.functions import allgather_object
from hvdtrain.torch.ops.submit import Reduction, check_adasum, submit
from hvdtrain.torch.ops.wire import memory_order
from hvdtrain.torch.reduction import fused_update, step_hooks
from hvdtrain.torch.reduction.memory import measure_script
from hvdtrain.torch.reduction.reducer import ANOTHERS_BACKWARD, Reducer
from hvdtrain.torch.reduction.reduction_unit import ReducerOptions
from hvdtrain.torch.reduction.shardable import check_memory
from hvdtrain.torch.reduction.sharded import Shards

_OURS = ("_hvd_reducer", "_hvd_should_synchronize", "_hvd_shards")


class DistributedMixin(torch.optim.Optimizer):
    """The base class put before the user's optimizer class; instances share the user's object's attributes."""

    _hvd_plain_class: type[torch.optim.Optimizer]
    _hvd_fuses: bool
    _hvd_reducer: Reducer
    _hvd_should_synchronize: bool
    _hvd_shards: Shards | None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Reduce the gradients, each time that a closure makes them, and take the user's optimizer's step."""
        reducer = self._reducer()
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None and self._hvd_shards is not None:  # it would make gradients after they were divided
            raise ValueError(
                "With a sharded state, step() takes no closure. Call backward() before step(), or use no shards. "
                f"Received: closure={closure!r} on rank {engine.native().rank()}"
            )
        if not self._hvd_should_synchronize:
            pass  # the user does it
        elif closure is None:
            if not reducer.is_synchronized:
                reducer.synchronize()
        elif reducer.is_distributed or reducer.scale != 1.0:
            reduced = self._reduced(closure)
            args, kwargs = ((reduced, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": reduced})
        reducer.is_synchronized = False
        fuses = self._hvd_fuses and not torch.compiler.is_compiling()
        with self._own_parts(args, kwargs) as (args, kwargs), fused_update.chosen(self) if fuses else nullcontext():
            result = super().step(*args, **kwargs)
        reducer.options.compression.commit()
        watchdog.step_done()
        return result

    # torch would wrap this `step` for profiling and hooks; the `step` that it calls is wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    @contextmanager
    def _own_parts(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Within it, with shards, groups hold this rank's parts; hooks of a step see whole weights before and after.

        Yields:
            the arguments of the step, which hooks may change.
        """
        shards = self._hvd_shards
        if shards is None:
            yield args, kwargs
            return
        with step_hooks.taken_out(self) as (before, after):
            if before and shards.is_stepping:
                raise ValueError(
                    'With shard="gradients", no rank has whole gradients that a hook before the step could see. '
                    f"Received: {before[0]!r} by register_step_pre_hook, on rank {engine.native().rank()}. Use "
                    'shard="optimizer", or clip_norm= instead of a hook that clips.'
                )
            args, kwargs = step_hooks.call_before(before, self, args, kwargs)
            with shards.stepping():
                yield args, kwargs
                shards.publish()
                with shards.whole_groups():
                    for hook in after:
                        hook(self, (self, *args), kwargs)

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return `closure` with its gradients and its loss reduced: all ranks search along the same line (LBFGS)."""
        reducer = self._reducer()
        if reducer.is_in_flight:  # gradients of a backward pass before step()
            reducer.synchronize()

        @functools.wraps(closure)
        def reduced() -> Any:
            loss = closure()
            reducer.synchronize()
            reducer.is_synchronized = False
            if loss is None or not reducer.is_distributed:
                return loss
            value = dtypes.as_numbers(loss).detach().clone()
            how = Reduction(reducer.options.op, process_set=reducer.options.process_set)
            submit([value], how, name="closure.loss", in_place=True).wait()
            return value if isinstance(loss, torch.Tensor) else float(value)

        return reduced

    def synchronize(self, *, weight: float | None = None, expected: float = 0.0) -> float | None:
        """Reduce the gradients now, for example before clipping; then call `step` under `skip_synchronize`.

        With a `weight` on every rank, such as the number of labels that count, the gradients are multiplied by
        `expected` / (sum of weights), and the sum is returned.
        """
        return self._reducer().synchronize(weight=weight, expected=expected)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within the block, `step` does not reduce, because `synchronize` was called before."""
        self._hvd_should_synchronize = False
        try:
            yield
        finally:
            self._hvd_should_synchronize = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; raises AssertionError between backward() and step(), while they are being reduced."""
        reducer = self._hvd_reducer
        if reducer.is_in_flight:
            raise AssertionError(
                "zero_grad() was called after backward() and before step(), while the gradients are being reduced. "
                f"Call optimizer.step() or optimizer.synchronize() first. {ANOTHERS_BACKWARD}"
            )
        reducer.is_synchronized = False
        if self._hvd_shards is not None:
            self._hvd_shards.gradients.clear()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, and drop the step in flight; call it on all ranks."""
        self._hvd_reducer.forget()
        super().load_state_dict(state_dict)

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather a sharded state on one rank, or on all (None): there `state_dict` returns it until the next step.

        A collective, as in torch's ZeroRedundancyOptimizer. Without shards it does nothing.
        """
        if self._hvd_shards is not None:
            self._hvd_shards.gather(to)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes per step, from the next step on."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0. Received: {passes}")
        self._hvd_reducer.set_passes_per_step(passes)

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that make up one step."""
        return self._hvd_reducer.passes_per_step

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step reads this just before it checks the gradients, so reduce them now. Else a rank with a local
        # infinity would skip the step alone.
        reducer = self._reducer()
        if self._hvd_should_synchronize and not reducer.is_synchronized:
            reducer.synchronize()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def _reducer(self) -> Reducer:
        """Return the reducer, which covers parameters that were added since."""
        if self._hvd_shards is None or not self._hvd_shards.is_stepping:  # then groups have parts of parameters
            self._hvd_reducer.cover(self.param_groups)
        return self._hvd_reducer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are then reduced too; call it on all ranks, with the same parameters."""
        super().add_param_group(param_group)
        if self._hvd_shards is not None:
            try:
                check_memory(param_group["params"])
            except ValueError:
                self.param_groups.pop()
                raise
        self._reducer()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies and pickles are of the user's own class: a file must not need hvdtrain to be read.
        if self._hvd_shards is not None and self.state:
            raise RuntimeError(
                "An optimizer whose state is in shards cannot be copied or pickled. Use "
                "optimizer.consolidate_state_dict() on every rank, then optimizer.state_dict()."
            )
        state = {k: v for k, v in self.__getstate__().items() if k not in (*_OURS, "step")}
        return copyreg._reconstructor, (self._hvd_plain_class, object, None), state  # type: ignore[attr-defined]


class AdasumMixin(DistributedMixin):
    """Gradients stay local, each rank takes its own step, and the parameters' changes are added up adaptively."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the user's optimizer's step on this rank's gradients, then combine the changes of all ranks."""
        reducer = self._reducer()
        before = {param: param.detach().clone() for param in reducer.passes if param.requires_grad}
        reducer.scale_gradients()
        result = self._hvd_plain_class.step(self, *args, **kwargs)
        how = Reduction(Adasum, process_set=engine.global_set())
        compression = reducer.options.compression
        in_flight = []
        for param, start in before.items():
            compressed, context = compression.compress(param.detach() - start)
            in_flight.append((submit([compressed], how, f"adasum.{reducer.names[param]}", in_place=True), context))
        for (param, start), (handle, context) in zip(before.items(), in_flight, strict=True):
            (change,) = handle.wait()
            param.detach().copy_(start + compression.decompress(change, context))
        return result

    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self, *, weight: float | None = None, expected: float = 0.0) -> None:
        """Do nothing: gradients are not reduced, and so cannot be weighed."""
        if weight is not None:
            raise ValueError(f"Adasum has no mean that could be weighed. Received: weight={weight}")

    def skip_synchronize(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Raise AssertionError: with Adasum a step without reduction has no meaning."""
        raise AssertionError("skip_synchronize() is not possible with Adasum, which reduces after the step.")


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
    average_aggregated_gradients: bool = False,
    shard_state: bool = False,
) -> Any:
    """Return `optimizer` as one whose `step` first reduces gradients over ranks.

    The result is an instance of the user's class and shares everything with the user's object: existing state,
    parameter groups, defaults, learning-rate schedulers made before. To be called on all ranks alike.

    On CPUs SGD, Adam and AdamW take their steps by torch's fused kernels where that changes nothing beyond rounding.

    Gradients are sent while backward still runs. To clip: `synchronize()`, clip, then `step()` under
    `skip_synchronize()`; with `GradScaler`, call `synchronize()` before `unscale_`.

    Args:
        optimizer: any torch optimizer.
        named_parameters: `model.named_parameters()`; names show in timelines and error messages.
        compression: `Compression.none`, `.fp16`, `.bf16`, `.int8`, `.topk(fraction)`, `.powersgd(rank)`, or your own
            `Compressor`.
        backward_passes_per_step: backward passes that make up one step; their gradients add up.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: with Average, divides before the sum, and multiplies after it.
        num_groups: Horovod's old word for groups.
        groups: number of groups to send gradients in, or a list of lists of parameters.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks over which to reduce; None means all.
        average_aggregated_gradients: divide by backward_passes_per_step.
        shard_state: each rank holds and updates 1/N of the optimizer's state; weights are gathered after each step. On
            every rank, call `consolidate_state_dict()` before `state_dict()`. For torch.optim's SGD, Adam, AdamW and
            others whose update of a number depends on that number alone.

    Raises:
        ValueError: no parameters; named_parameters of another model, or with a name twice; an option out of range;
            Adasum over Gloo.
        DesyncError: on every rank, if ranks have different parameters; names the first.
    """
    if process_set is None:
        refuse_grid("A DistributedOptimizer over all ranks", "Pass process_set=grid.process_set")
    process_set = engine.global_set(process_set)
    if num_groups != 0:
        warnings.warn("num_groups is Horovod's old word. Use groups.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _check_options(op, gradient_predivide_factor, backward_passes_per_step, groups)
    named = _name_parameters(optimizer, named_parameters)
    dtypes.refuse_divided(named)
    _check_agreement(named, process_set)
    bound = resolve(compression).bind([name for name, _ in named])
    options = ReducerOptions(
        bound, op, gradient_predivide_factor, groups, sparse_as_dense, process_set, average_aggregated_gradients
    )
    if op == Adasum and bound.has_memory:
        raise ValueError(
            f"Adasum combines the steps of ranks, and reduces no gradients. Received: compression={bound.name}, which "
            "remembers what it has left out of each gradient. Use Compression.none, .fp16 or .bf16."
        )
    if shard_state and op == Adasum:
        raise ValueError("Adasum needs whole steps of each rank. Received: shard_state=True with op=Adasum.")
    mixin: type[DistributedMixin] = DistributedMixin
    if op == Adasum and engine.native().size() > 1:
        if not engine.is_global(process_set):
            raise NotImplementedError("Adasum runs over all ranks. Received: another process set.")
        check_adasum(named[0][1])
        mixin = AdasumMixin
    plain = type(optimizer)
    if isinstance(optimizer, DistributedMixin):  # wrapped again, with other options
        plain = optimizer._hvd_plain_class
        optimizer._hvd_reducer.detach()
    described = {name: getattr(plain, name) for name in ("__module__", "__doc__", "__qualname__")}
    horovods = {"op": op, "process_set": process_set}  # attributes that Horovod's optimizer has
    ours = {"_hvd_plain_class": plain, "_hvd_fuses": fused_update.applies_to(plain)}
    cls: Any = type(plain.__name__, (mixin, plain), {**described, **horovods, **ours})
    distributed = object.__new__(cls)
    distributed.__dict__ = optimizer.__dict__
    distributed._hvd_should_synchronize = True
    distributed._hvd_shards = _shards(optimizer, process_set, wanted=shard_state)
    distributed._hvd_reducer = Reducer(named, optimizer.param_groups, options, backward_passes_per_step)
    _move_scheduler(distributed)
    measure_script(distributed)
    return distributed


def _shards(optimizer: torch.optim.Optimizer, process_set: Any, *, wanted: bool) -> Shards | None:
    """Return the shards of an optimizer's state; those that it has, if it was wrapped before."""
    held: Shards | None = optimizer.__dict__.get("_hvd_shards")
    if held is not None and (not wanted or held.process_set.ranks != process_set.ranks):
        raise ValueError(
            "This optimizer's state is in shards already. Received: "
            f"shard_state={wanted}{' with another process set' if wanted else ''}. Make a new optimizer."
        )
    has_peers = process_set.size() > 1 or launch_environment.reduces_alone()
    return held or (Shards(optimizer, process_set) if wanted and has_peers else None)


def _check_options(op: int, predivide: float, passes: int, groups: Any) -> None:
    if predivide != 1.0 and op != Average:
        raise ValueError(f"gradient_predivide_factor needs op=Average. Received: {predivide} with op={op}")
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0. Received: {passes}")
    if groups is None or (isinstance(groups, int) and groups >= 0):
        return
    if not isinstance(groups, list):
        raise ValueError(f"groups must be a number >= 0 or a list of lists of parameters. Received: {groups!r}")
    members = [p for group in groups for p in group]
    if any(not isinstance(p, torch.Tensor) for p in members) or len({id(p) for p in members}) < len(members):
        raise ValueError("groups must hold parameters only, not names, and each parameter in one group only")


def _name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Any]] | None
) -> list[tuple[str, Parameter]]:
    """Return the optimizer's parameters with names, in the order of its groups; then those that it may get later."""
    places = [(i, j, p) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])]
    given = None if named_parameters is None else list(named_parameters)
    lazy.check([(f"a parameter of group {i}", p) for i, _, p in places], what="DistributedOptimizer")
    if not places or given == []:
        raise ValueError("There are no parameters to train: is the model without parameters?")
    if given is None:
        return [(f"allreduce.noname.{i}.{j}", p) for i, j, p in places]
    for item in given:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise ValueError(
                "named_parameters must be (name, parameter) tuples, such as model.named_parameters(). "
                f"Received: {type(item).__name__}"
            )
    given = [(names.plain(name), parameter) for name, parameter in given]
    twice = sorted(name for name, times in Counter(name for name, _ in given).items() if times > 1)
    if twice:
        raise ValueError(f"named_parameters must have unique names. Received twice: {', '.join(twice)}")
    name_of = {p: name for name, p in given}
    unnamed = [tuple(p.shape) for *_, p in places if p not in name_of]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's {len(places)} parameters, the first of shape "
            f"{unnamed[0]}: are they another model's? Pass the named_parameters() of the optimizer's model."
        )
    reduced = {p for *_, p in places}
    return [(name_of[p], p) for *_, p in places] + [(name, p) for name, p in given if p not in reduced]


def _check_agreement(named: list[tuple[str, Parameter]], process_set: Any) -> None:
    """Raise DesyncError on every rank if names, shapes, types or layouts of parameters differ; a collective."""
    # In an elastic job a new rank builds its model alone, before it joins the others.
    if process_set.included() is False or process_set.size() == 1 or launch_environment.is_elastic():
        return
    ours = [(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), _layout(p)) for name, p in named]
    found = first_difference(allgather_object(ours, process_set=process_set))
    if found is not None:
        number, index, *both = found
        ranks = process_set.ranks or range(process_set.size())
        first, other = ("none" if each is None else "{} of shape {} and type {}{}".format(*each) for each in both)
        raise DesyncError(
            f"Ranks have different models. Parameter {index + 1}: rank {ranks[0]} has {first}, rank {ranks[number]} "
            f"has {other}. Build the same model, in the same order, on every rank."
        )


def _layout(parameter: Parameter) -> str:
    """Return words for a parameter whose memory is in another order than its dimensions, and "" for others."""
    order = memory_order(parameter)
    return "" if order is None else f" with its dimensions in the order {order} in memory"


def _move_scheduler(distributed: Any) -> None:
    """Replace the `step` that a scheduler has put on the user's object to count calls; it would go past ours."""
    patched = distributed.__dict__.pop("step", None)
    if patched is None:
        return
    if not hasattr(patched, "_wrapped_by_lr_sched"):
        words = "was replaced on the object; DistributedOptimizer calls its class's step. Replace it afterwards."
        warnings.warn(f"The optimizer's own step ({patched!r}) {words}", stacklevel=3)
        return
    this = weakref.ref(distributed)
    step = type(distributed).step

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        optimizer = this()
        if optimizer is None:
            raise ReferenceError("The optimizer that hvd.DistributedOptimizer returned is gone; keep it and step it.")
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    watched._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    distributed.step = watched

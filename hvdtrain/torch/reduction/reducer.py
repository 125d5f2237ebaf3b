"""Reduce gradients over ranks while backward is still running."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.distributed import gpu_path, launch_environment, tuning, watchdog
from hvdtrain.distributed.recorder import recorder
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops import engine, pack
from hvdtrain.torch.ops.engine import Adasum, Average, Handle
from hvdtrain.torch.ops.submit import active_ranks_async
from hvdtrain.torch.reduction import bucket
from hvdtrain.torch.reduction.reduction_unit import ReducerOptions, ReductionUnit, drain, reduction
from hvdtrain.torch.reduction.scattered import Scatter, ScatteredUnit
from hvdtrain.torch.reduction.sharded import Shards
from hvdtrain.torch.reduction.weighted_mean import FAILED, WeightedMean

_Counts = list[list[tuple[float, float]]]  # for each unit and parameter: on how many ranks it is dense, and sparse

ANOTHERS_BACKWARD = (
    "If another optimizer's loss goes through these parameters, as a GAN's does, leave them out of its backward: "
    "loss.backward(inputs=list(generator.parameters()))."
)


class Reducer:
    """Reduces gradients over ranks, and owns the names of parameters; the optimizer calls `synchronize` before a step.

    A unit (a parameter, a group, or a bucket) is sent as soon as backward has made all of its gradients. In
    `synchronize` the ranks first exchange flags: which gradients they have. A gradient that is missing on one rank
    counts as zeros; one that is missing on all ranks stays missing, as in one process. After the first step, small
    gradients that were dense on all ranks are sent in buckets, and the last bucket carries the flags. Where a
    compressor takes several gradients in one exchange, those that were sparse on no rank are sent together.

    `named` has the parameters that the optimizer may get later too. Adasum combines steps and reduces no gradients.
    """

    def __init__(
        self, named: list[tuple[str, Parameter]], groups: list[dict[str, Any]], options: ReducerOptions, passes: int
    ) -> None:
        self.options = options
        self.passes_per_step = passes
        self.is_synchronized = False
        self._sent: list[ReductionUnit] = []  # of this step, in the order in which they were sent
        self.names: dict[Parameter, str] = {param: name for name, param in named}
        self.passes: dict[Parameter, int] = {}  # since the last step, of each parameter that is reduced
        self._counts_again = False
        # Parameters whose gradients are not sent during backward: a pass may add to them more than once.
        self._held_back: set[Parameter] = set()
        self._repeated: set[Parameter] = set()  # those of which it is known
        self._on_gpu = False
        self._units: list[ReductionUnit] = []
        self._unit_of: dict[Parameter, ReductionUnit] = {}
        self._hooks: dict[Parameter, Any] = {}
        self._in_flight: dict[str, Handle] = {}  # the step's operations besides units
        self._abandoned: dict[str, Handle] = {}  # those of a step that failed
        self._generation = engine.generation
        self._packs = bucket.can_pack(options)
        self._scatter: Scatter | None = None
        self._dense: list[Parameter] | None = None  # with dense gradients on all ranks; None until that is known
        self._closing: bucket.Bucket | None = None  # the bucket that is sent with the flags, in `synchronize`
        included = options.process_set.included() is not False
        has_peers = options.process_set.size() > 1 or launch_environment.reduces_alone()
        self.is_distributed = bool(options.op != Adasum and included and has_peers)
        self.cover(groups)

    # Parameters

    def cover(self, groups: Sequence[dict[str, Any]]) -> None:
        """Reduce all parameters of an optimizer's groups, from the next step on."""
        if all(self.passes.keys() >= set(group["params"]) for group in groups):
            return
        self._closing = None  # this bucket has no room for the new parameters' flags
        new = []
        for i, group in enumerate(groups):
            for j, param in enumerate(group["params"]):
                if param not in self.passes:
                    self.names.setdefault(param, f"allreduce.noname.{i}.{j}")
                    self.passes[param] = 0
                    new.append(param)
        self._held_back.update(new if self._counts_again else ())
        self._on_gpu = self._on_gpu or any(param.is_cuda for param in new)
        if self.is_distributed:
            if self._scatter is not None:
                self._scatter.cover(new)
            for members in pack.partition(new, self.options.groups):
                self._add_plain(members)
            self.attach()

    def _add_unit(self, kind: type[ReductionUnit], params: list[Parameter], **options: Any) -> Any:
        unit = kind(params, [self.names[param] for param in params], self.options, self.scale, **options)
        self._units.append(unit)
        self._unit_of.update((param, unit) for param in params)
        return unit

    def _add_plain(self, params: list[Parameter]) -> None:
        if self._scatter is not None and len(params) == 1 and params[0].numel():
            self._add_unit(ScatteredUnit, params, scatter=self._scatter)
        else:
            self._add_unit(ReductionUnit, params)

    def scatter(self, shards: Shards) -> None:
        """Give each rank its part of each gradient only; called before the first backward pass."""
        self._scatter = Scatter(shards)
        if shards.parameters[0].is_cpu:
            tuning.return_large_blocks()
        units, self._units = self._units, []
        self._scatter.cover(param for unit in units for param in unit.params)
        for unit in units:
            self._add_plain(unit.params)

    @property
    def packed(self) -> NDArray[np.uint8] | None:
        """For each parameter, whether its gradient may be sent with others, equal on all ranks; None before they know.

        A resumed run sets it before its first step: on three ranks or more, buckets decide the last bit of sums.
        """
        dense = None if self._dense is None else set(self._dense)
        return None if dense is None else np.array([param in dense for param in self.passes], np.uint8)

    @packed.setter
    def packed(self, flags: NDArray[np.uint8]) -> None:
        self._renew()
        if self._packs and self.is_distributed and len(flags) == len(self.passes):
            self._unpack()
            self._pack([param for param, flag in zip(self.passes, flags, strict=True) if flag])

    def _pack(self, dense: list[Parameter]) -> None:
        """Send such gradients together from the next step on: in buckets, or by a compressor's exchanges."""
        self._dense = dense
        bucket_bytes = self.options.compression.bucket_bytes
        buckets = pack.filled(dense, bucket_bytes) if bucket_bytes else pack.buckets(dense)
        packed = {param for members in buckets for param in members}
        self._units = [unit for unit in self._units if unit.params[0] not in packed]
        for members in buckets:
            if bucket_bytes:
                self._add_plain(members)
                continue
            is_last = members is buckets[-1] and bucket.can_carry_flags(members[0], self.options)
            made = self._add_unit(bucket.Bucket, members, header=2 + 2 * len(self.passes) if is_last else 0)
            self._closing = made if is_last else None

    def _unpack(self) -> None:
        """Send each parameter alone again: a rank that is new to the run has no buckets yet."""
        was_packed, self._dense, self._closing = self._dense is not None, None, None
        buckets = [unit for unit in self._units if isinstance(unit, bucket.Bucket) or len(unit.params) > 1]
        if not was_packed or not buckets:
            return
        self._units = [unit for unit in self._units if unit not in buckets]
        for param in [param for unit in buckets for param in unit.params]:
            self._add_plain([param])
        # Ranks list their gradients in the order of the parameters. A new rank does so from the beginning.
        order = {param: index for index, param in enumerate(self.passes)}
        self._units.sort(key=lambda unit: order[unit.params[0]])

    def detach(self) -> None:
        """Remove the hooks from the parameters, because another reducer replaces this one."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def attach(self) -> None:
        """Add the hooks to the parameters; `cover` and `synchronize` do it too."""
        if len(self._hooks) == len(self.passes):  # else some are frozen: one may not be since the last step
            return
        this = weakref.ref(self)  # parameters outlive optimizers; a deleted optimizer must not reduce

        def hook(param: Any) -> None:
            if (reducer := this()) is not None:
                reducer._on_gradient(param)

        for param in self.passes:
            if param.requires_grad and param.is_leaf and param not in self._hooks:
                self._hooks[param] = param.register_post_accumulate_grad_hook(hook)

    @property
    def scatters(self) -> bool:
        """True if each rank gets its part of gradients only."""
        return self._scatter is not None

    @property
    def nbytes(self) -> int:
        """The bytes of buckets, and of what a compressor remembers."""
        memory = getattr(self.options.compression, "memory", None)
        return sum(getattr(unit, "nbytes", 0) for unit in self._units) + (memory.nbytes if memory else 0)

    # Steps

    @property
    def scale(self) -> float:
        """The factor for a gradient that is summed over a step's backward passes."""
        return 1.0 / self.passes_per_step if self.options.average_aggregated_gradients else 1.0

    @property
    def is_in_flight(self) -> bool:
        """True while gradients of a step are sent or wait to be sent, until they are reduced."""
        self._renew()
        return any(unit.is_started or unit.ready for unit in self._units)

    def set_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes per step, from the next step on."""
        self.passes_per_step = passes
        self.passes = dict.fromkeys(self.passes, 0)
        for unit in self._units:
            unit.set_scale(self.scale)

    def count_again(self) -> None:
        """Accept a backward pass that adds to a gradient several times, as one through reentrant checkpoints does.

        For who calls `synchronize` after the step's last pass. A parameter's first gradient is sent then, and so are
        all gradients of a parameter to which a pass has added more than once.
        """
        self._counts_again = True
        self._held_back = set(self.passes)

    def forget(self) -> None:
        """Drop the step in flight. Before its names are used again, the reducer waits for its operations."""
        self._renew()
        self._abandon()
        self._end_step()
        self.is_synchronized = False

    def _renew(self) -> None:
        """Drop a step that an elastic reset has interrupted: its handles are invalid afterwards."""
        if self._generation != engine.generation:
            self._generation = engine.generation
            self._end_step()
            self._unpack()
            if self._scatter is not None:
                self._scatter.renew()
            self.options.compression.reset()  # a rank that is new to the run remembers nothing

    def _abandon(self) -> None:
        for unit in self._units:
            unit.abandon()
        self._abandoned = self._in_flight

    def _end_step(self) -> None:
        self._in_flight, self._sent = {}, []
        self.passes = dict.fromkeys(self.passes, 0)
        for unit in self._units:
            unit.reset()

    def _on_gradient(self, param: Parameter) -> None:
        self._renew()
        passes = self.passes[param] + 1
        if passes > self.passes_per_step:
            if param not in self._held_back or self._unit_of[param].is_started:
                raise AssertionError(self._too_often(param))
            self._repeated.add(param)
        self.is_synchronized = False
        self.passes[param] = passes
        if passes == self.passes_per_step:
            unit = self._unit_of[param]
            unit.ready += 1
            is_complete = unit.ready == len(unit.params) and unit is not self._closing
            if is_complete and (not self._held_back or self._held_back.isdisjoint(unit.params)):
                self._start(unit)

    def _start(self, unit: ReductionUnit, *, sparse: bool = False) -> None:
        if not self._sent:
            self.options.compression.rollback()  # of an earlier step that was not taken
        unit.start(self._all_active, sparse=sparse)
        self._sent.append(unit)
        if self._scatter is not None:
            self._scatter.make_room()

    def _too_often(self, param: Parameter) -> str:
        return (
            f"The gradient of {self.names[param]} was computed more than backward_passes_per_step="
            f"{self.passes_per_step} times before step(). If there was one backward() for each of these passes, the "
            "layer is used in several reentrant checkpoints: give torch.utils.checkpoint use_reentrant=False. "
            f"Else raise backward_passes_per_step, or call optimizer.step() after each backward. {ANOTHERS_BACKWARD}"
        )

    def _all_active(self) -> bool:
        """Return whether no rank has joined; units that need all ranks check it first."""
        if not engine.is_global(self.options.process_set):
            return True
        if "active" not in self._in_flight:
            drain(self._abandoned.pop("active", None))
            self._in_flight["active"] = active_ranks_async("gradients")
        return bool(self._in_flight["active"].wait() == self.options.process_set.size())

    def synchronize(self, *, weight: float | None = None, expected: float = 0.0) -> float | None:
        """Reduce all gradients of this step and wait for them; return the sum of the ranks' weights, None without.

        Either all ranks give a weight or none. Gradients come scaled for weights whose sum is `expected`; if the sum is
        another, they are multiplied by expected / sum. A rank may give FAILED where others give none: then all ranks
        get FAILED, and the gradients mean nothing.
        """
        if not self.is_distributed:
            self.scale_gradients()
            self._end_step()
            self.is_synchronized = True
            return weight
        self._renew()
        self.attach()
        try:
            with recorder.waiting():
                total = self._synchronize(weight, expected)
            if len(self._held_back) > len(self._repeated) and total != FAILED:
                done = {param for param, passes in self.passes.items() if passes == self.passes_per_step}
                self._held_back -= done - self._repeated
        except BaseException:
            self._abandon()
            raise
        finally:
            self._end_step()
        self.is_synchronized = True
        if self._on_gpu and gpu_path.is_async():  # the host goes ahead; the watchdog checks the device
            behind = torch.cuda.Event()
            behind.record()
            watchdog.note_device(behind.query)
        return total

    def _synchronize(self, weight: float | None, expected: float) -> float | None:
        size = self.options.process_set.size()
        if self.options.compression.needs_all_ranks:
            self._all_active()  # a collective: every rank takes part in every step, even if it started no bucket
        if self._scatter is None:  # else only when it is known that other ranks start them too, since a rank waits
            self._start_own()
        mean = WeightedMean([flag for unit in self._units for flag in unit.flags()], weight, expected)
        active, counts = self._exchange_flags(mean)
        total = mean.weight
        if counts is not None:
            self._start_what_others_have(counts)
        elif self._scatter is not None:
            self._start_own()
        advancing = self._sent
        while advancing:  # one collective of each unit after the other: those of several units are in flight at once
            advancing = [unit for unit in advancing if unit.advance()]
        correction = mean.correction()
        if weight is None and self.options.op == Average:
            correction = size / active
        ranks_of = dict(zip(self._units, counts, strict=True)) if counts else {}
        for unit in self._sent:  # in this order they arrive: what is done with one does not wait for a later one
            present = [any(ranks) for ranks in ranks_of[unit]] if counts else None
            unit.finish(present, correction)
        # Only if all ranks took part, so that all of them pack in the same step.
        if self._packs and self._dense is None and active == size and total != FAILED:
            self._pack(self._packable(counts))
        return total

    def _packable(self, counts: _Counts | None) -> list[Parameter]:
        """Return the parameters, each of which was sent alone, whose gradients can be sent with others."""
        size, found = self.options.process_set.size(), []
        for index, unit in enumerate(self._units):
            dense, sparse = counts[index][0] if counts else (size * flag for flag in unit.flags())
            # A compressor makes zeros small; a bucket of a few gradients does not.
            if dense == size or (dense and not sparse and self.options.compression.bucket_bytes):
                found.append(unit.params[0])
        return found

    def _start_own(self) -> None:
        """Send the gradients that this rank has and backward has not sent."""
        for unit in self._units:
            if not unit.is_started and unit is not self._closing and any(p.grad is not None for p in unit.params):
                self._start(unit)

    def _start_what_others_have(self, counts: _Counts) -> None:
        """Take part in the reductions of gradients that this rank lacks."""
        for unit, ((dense, sparse), *_) in zip(self._units, counts, strict=True):
            if unit.takes_sparse and dense and sparse:
                unit.reset()  # no other rank takes part in this unit's operation: do not wait for it
                raise HvdTrainError(
                    f"The gradient of {unit.names[0]} is sparse on {sparse} rank(s) and dense on {dense}. Use "
                    "the same layer on every rank, or sparse_as_dense=True."
                )
        for unit, ranks in zip(self._units, counts, strict=True):
            if not unit.is_started and any(map(any, ranks)):
                self._start(unit, sparse=bool(ranks[0][1]))

    def _exchange_flags(self, mean: WeightedMean) -> tuple[int, _Counts | None]:
        """Add up weights and flags over ranks; return how many ranks have not joined, and the counts.

        There are no counts where every rank has exactly the gradients of this one. What is exchanged is reduced as
        gradients are; what the reduction multiplied it by is undone here.
        """
        flags, numbers = mean.flags, [1.0, *mean.numbers]
        if self._closing is not None:
            how, received = self._closing.how, self._closing.exchange(numbers, self._all_active)
            self._sent.append(self._closing)
        else:
            drain(self._abandoned.pop("numbers", None))
            how = reduction(self.options, self.scale)
            # Not torch's default type: in float16 a weight above 65504 would be infinite, and all gradients zero.
            counts = torch.tensor(numbers, dtype=torch.float32, device="cpu")
            sent = how.send(counts, "gradients.present")
            self._in_flight["numbers"] = Handle([sent], Tensor.tolist)
            received = self._in_flight["numbers"].wait()
        size = how.process_set.size()
        factor = how.prescale_factor * how.postscale_factor
        one = factor / size if how.op == Average else factor  # what a rank adds to a received number
        # In nearly all steps, all ranks have the same flags, so that their mean equals this rank's.
        if how.op == Average and factor == 1.0 == received[0] and received[2:] == flags:
            mean.receive([received[1] / one, *flags])
            return size, None
        mean.receive([received[1] / one, *(round(number / one) for number in received[2:])])
        active = round(received[0] / one) if engine.is_global(how.process_set) else size
        if active == size and mean.flags == [size * flag for flag in flags]:
            return active, None
        pairs = zip(mean.flags[::2], mean.flags[1::2], strict=True)
        return active, [list(islice(pairs, len(unit.params))) for unit in self._units]

    def scale_gradients(self) -> None:
        """Average the gradients over the step's backward passes, if so requested, without any reduction."""
        if self.scale != 1.0 and self.options.process_set.included() is not False:
            for param in self.passes:
                if param.grad is not None:
                    param.grad.mul_(self.scale)

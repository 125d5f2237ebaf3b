"""Grid: what a script with a model larger than a device asks for its ranks."""

from __future__ import annotations

import atexit
import contextlib
import logging
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hvdtrain.distributed import launch_environment, watchdog
from hvdtrain.distributed.world import init
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.grid import groups
from hvdtrain.torch.grid.layout import AXES, Layout
from hvdtrain.torch.grid.pipeline import Stage
from hvdtrain.torch.ops import divided, engine, names, pack, reduce_ops
from hvdtrain.torch.ops.functions import broadcast_parameters
from hvdtrain.torch.ops.sparse import gradient_values, no_entries

log = logging.getLogger("hvdtrain")
_WITHIN = ("stage", "shard", "tensor")  # the axes within a replica
_DIVIDING = ("shard", "tensor")  # the axes along which torch divides a weight
_DENSE, _SPARSE = 1, 2  # kinds of gradients; 0: none


class Grid:
    """The ranks of a job as replicas of a model, each of several ranks: stages, shards, tensor parts, or a combination.

    Within a replica the model is divided by torch: `torch.distributed.pipelining`, `fully_shard`, `parallelize_module`.
    Across replicas gradients are averaged by Horovod. torch.distributed runs on the job's Horovod, so nothing else has
    to be started or configured. A collective; make one Grid, after `hvdtrain.init` and before the model.

    Ranks of a tensor group are neighbours, then those of a shard group, then stages, then replicas. Ranks of one host
    are placed together, in whatever order the launcher numbered them.

    Args:
        stages: parts of the model, one behind the other, for `torch.distributed.pipelining`.
        shard: ranks that share out each weight, for `fully_shard`. Each computes with data of its own.
        tensor: ranks that share out the computation of a layer, for `parallelize_module`.

    Attributes:
        replicas, stages, shards, tensors: the lengths of the axes.
        replica, stage, shard, tensor: this rank's place along each.
        data_rank, data_size: rank and num_replicas for a sampler: this rank's number among those that divide the data
            (replicas and shards), and how many there are. Ranks of other stages or tensor parts get the same data.
        process_set: Horovod's process set of the ranks that hold this rank's part of the model, one in each replica.
        stages_set: that of the ranks that are stages of one pipeline with this one.
        shard_set: that of the ranks that share out each weight of this rank's stage with it.
        replica_set: that of the ranks of this rank's replica.
        world: the ranks of the job.

    Raises:
        ValueError: the number of ranks is no multiple of stages x shard x tensor; with the numbers that are.
        HvdTrainError: torch.distributed is initialised already, or the job is elastic.
    """

    def __init__(self, *, stages: int = 1, shard: int = 1, tensor: int = 1) -> None:
        world = init("torch")
        if launch_environment.is_elastic():
            raise HvdTrainError(
                "A rank of a Grid may hold a part of the model that no other rank has, so an elastic job could not "
                "continue without it. Launch with a fixed number of ranks. Received: an elastic job, on rank "
                f"{world.rank}"
            )
        hosts = world.allgather_object(socket.gethostname(), name="grid.hosts")
        self.world = world
        self._layout = layout = Layout.of(hosts, stages=stages, shard=shard, tensor=tensor)
        self.replicas, self.stages, self.shards, self.tensors = map(layout.length, AXES)
        place = layout.place(world.rank)
        self.replica, self.stage, self.shard, self.tensor = (place[axis] for axis in AXES)
        self._data = layout.group(world.rank, "replica", "shard")
        self.data_rank, self.data_size = self._data.index(world.rank), len(self._data)
        groups.start(_groups(layout))
        self.process_set = groups.process_set(layout.group(world.rank, "replica"))
        self.stages_set = groups.process_set(layout.group(world.rank, "stage"))
        self.shard_set = groups.process_set(layout.group(world.rank, "shard"))
        self.replica_set = groups.process_set(layout.group(world.rank, *_WITHIN))
        self._mesh = DeviceMesh(torch.device(world.device).type, torch.from_numpy(layout.ranks), mesh_dim_names=AXES)
        world.grid, world.part_set = self, self.process_set
        world.data_set = groups.process_set(self._data)
        atexit.register(self._wait_at_exit)
        if world.is_root:
            self._say()

    def pipeline(
        self,
        model: nn.Sequential,
        *,
        micro_batches: int,
        schedule: str = "1f1b",
        at: Sequence[str] = (),
    ) -> Stage:
        """Return this rank's stage of a model, for the Trainer or a custom loop; see `Stage`.

        Args:
            model: its layers; the same on all ranks. Each stage gets some that follow each other.
            micro_batches: parts of a batch that go through the stages one after the other, at least as many as stages.
                Stages wait for (stages - 1) / (micro_batches + stages - 1) of a step's time.
            schedule: torch's "1f1b", in which a stage holds the activations of at most `stages` micro-batches, or
                "gpipe", in which it holds those of all.
            at: names of the layers with which the stages after the first begin, such as ["3", "6"]. By default the
                largest stage is as small as possible, in bytes of parameters and buffers.

        Raises:
            TypeError: the model is no nn.Sequential.
            ValueError: fewer layers than stages, a parameter in two stages, or an argument out of its range.
        """
        if not isinstance(model, nn.Sequential):
            raise TypeError(
                "A pipeline takes an nn.Sequential, whose layers it divides among the stages. Received: "
                f"{type(model).__name__} on rank {self.world.rank}"
            )
        layers = {name: layer for name, layer in model._modules.items() if layer is not None}
        stage = Stage(self, layers, micro_batches=micro_batches, schedule=schedule, at=at)
        if self.world.is_root:
            log.info("%s", stage.describe())
        return stage

    def rank_of(self, *, stage: int) -> int:
        """Return the rank of a stage, among those that are stages of one pipeline with this rank."""
        return self._layout.group(self.world.rank, "stage")[stage]

    @property
    def part(self) -> str:
        """The name of this rank's part of the model: its stage, shard and tensor part."""
        return f"{self.stage}.{self.shard}.{self.tensor}"

    def describe_part(self) -> str:
        """Return this rank's part of the model in words, such as "stage 1, shard 0 on rank 2"."""
        axes = {"stage": (self.stages, self.stage), "shard": (self.shards, self.shard)}
        axes["tensor part"] = (self.tensors, self.tensor)
        places = [f"{axis} {place}" for axis, (length, place) in axes.items() if length > 1]
        return f"{', '.join(places) or 'the whole model'} on rank {self.world.rank}"

    @property
    def part_root(self) -> int:
        """The rank of the first replica that holds this rank's part of the model."""
        return self._layout.group(self.world.rank, "replica")[0]

    def mesh(self, *axes: str) -> DeviceMesh:
        """Return torch's mesh of the ranks that differ from this one along these axes only.

        Args:
            axes: of "replica", "stage", "shard" and "tensor", in this order. `fully_shard` takes `mesh("shard")`, or
                `mesh("replica", "shard")`: then it averages over replicas itself.
        """
        if not axes or list(axes) != [axis for axis in AXES if axis in axes]:
            raise ValueError(f"mesh takes names of {', '.join(AXES)}, in this order. Received: {', '.join(axes)}")
        return self._mesh[axes]

    def group(self, axis: str) -> Any:
        """Return torch's process group along an axis, such as `group("stage")` for a PipelineStage."""
        return self.mesh(axis).get_group()

    def broadcast_parameters(self, module: nn.Module) -> None:
        """Overwrite this rank's parameters and buffers with those of the first rank that holds the same. A collective.

        That is the rank of the first replica. What torch has not divided, shards and tensor parts hold alike too,
        except buffers that no state has (persistent=False): each tensor part may have values of its own in them.
        """
        held = {names.plain(name): value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
        by_axes: defaultdict[tuple[str, ...], dict[str, Tensor]] = defaultdict(dict)
        for name, value in (held | dict(names.buffers(module))).items():
            alike = _DIVIDING if name in held else ("shard",)
            axes = ("replica", *(axis for axis in alike if not divided.has_parts_along(value, axis)))
            by_axes[axes][name] = divided.local(value).detach()
        for axes, tensors in by_axes.items():
            ranks = self._layout.group(self.world.rank, *axes)
            if len(ranks) > 1:
                broadcast_parameters(tensors, ranks[0], groups.process_set(ranks))

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients by their mean over replicas, between backward and step. A collective.

        A parameter without a gradient counts as zeros if another replica has one. For exact means over samples,
        multiply each rank's loss by `loss_weight`.

        Args:
            parameters: of this rank's part of the model, the same on all replicas; their order too.

        Raises:
            ValueError: the Grid has shards, and a parameter that is trained is not divided over them.
        """
        trained = [each for each in parameters if each.requires_grad]
        if left_out := [each for each in trained if self.is_left_out(each)]:
            raise ValueError(
                "Ranks of a shard group have other samples, so a weight that fully_shard has not divided would differ "
                f"from rank to rank. Received: {len(left_out)} such weights, the first of shape "
                f"{tuple(left_out[0].shape)}, on rank {self.world.rank}. Divide the model too, after its layers: "
                'fully_shard(model, mesh=grid.mesh("shard"))'
            )
        if self.replicas == 1:
            return
        kinds = np.array([_kind(each.grad) for each in trained], np.int32)
        somewhere = self.world.allreduce(kinds, "max", name="grid.flags", process_set=self.process_set)
        dense = [each for each, kind in zip(trained, somewhere, strict=True) if kind == _DENSE]
        sparse = [each for each, kind in zip(trained, somewhere, strict=True) if kind == _SPARSE]
        by_dtype: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for parameter in dense:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype[parameter.dtype].append(divided.local(parameter.grad))
        for dtype, gradients in by_dtype.items():
            reduce_ops.grouped_allreduce_(gradients, name=f"grid.gradients.{dtype}", process_set=self.process_set)
        for parameter in sparse:
            gradient = no_entries(parameter) if parameter.grad is None else parameter.grad
            how = ("grid.gradients.sparse", engine.Average, self.process_set)
            parameter.grad = reduce_ops.sparse_allreduce_async(gradient, *how).wait().coalesce()

    def is_left_out(self, parameter: nn.Parameter) -> bool:
        """Return whether the ranks of a shard group would train a parameter apart, each with its own samples."""
        return self.shards > 1 and parameter.requires_grad and not divided.is_over(parameter, "shard")

    def loss_weight(self, count: float) -> float:
        """Return the factor for this rank's mean loss with which gradients are means over all samples. A collective.

        Args:
            count: samples in this rank's batch, or what its loss is the mean of, such as labels or the sum of their
                classes' weights; the same on ranks with the same data.
        """
        count = float(count)  # exact for whole numbers, and weights of classes are none
        counts = self.world.allgather(np.array([count]), name="grid.counts")
        total = sum(float(counts[rank]) for rank in self._data)
        if not total:
            raise ValueError(f"No rank has a sample in this step. Received: count={count} on rank {self.world.rank}")
        return count * self.data_size / total

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float) -> float:
        """Scale gradients to a norm over the whole model of at most `max_norm`; return the norm before. A collective.

        As `torch.nn.utils.clip_grad_norm_`, over the parts of all stages and shards. Call it after `average_gradients`.
        """
        gradients = [gradient_values(each) for each in parameters if each.grad is not None]
        by_mesh = pack.alike(gradients, lambda each: getattr(each, "device_mesh", None))
        square = float(sum(_norm(part) ** 2 for part in by_mesh))
        if self.stages > 1:
            how = {"name": "grid.norm", "process_set": self.stages_set}
            square = float(self.world.allreduce(np.array([square]), **how)[0])
        norm = float(np.sqrt(square))
        factor = max_norm / (norm + 1e-6)  # torch's, of which 1e-6 avoids a division by 0
        if not factor >= 1:  # also NaN, with which no stage may take a step that another cannot
            for gradient in gradients:
                gradient.detach().mul_(factor)
        return norm

    def __deepcopy__(self, memo: dict[int, Any]) -> Grid:
        return self  # the ranks of a job, which a copied stage shares with the one that it was copied from

    def __reduce__(self) -> Any:
        raise TypeError(
            "A Grid is the ranks of this job, and no file holds them. Write stage.state_dict(), and not the stage. "
            f"Received: {self} on rank {self.world.rank}"
        )

    def close(self) -> None:
        """End torch.distributed, and give the groups back. A collective; at the end of a script it is not needed."""
        atexit.unregister(self._wait_at_exit)
        groups.stop()
        self.world.grid = self.world.part_set = self.world.data_set = None

    def _wait_at_exit(self) -> None:
        """Let ranks whose script ends early wait for the others: a rank that leaves ends Horovod for all.

        After other stages have ended, ranks of the last one may still evaluate. A rank that leaves with an error's
        status does not wait: what others expect of it never comes.
        """
        if not watchdog.is_failing():
            with contextlib.suppress(Exception):  # another rank has failed, and says so itself
                self.world.allreduce(np.zeros(1, np.int32), name="grid.end")

    def __str__(self) -> str:
        return f"Grid({self._in_words()})"

    def _in_words(self) -> str:
        lengths = {"stages": self.stages, "shard": self.shards, "tensor": self.tensors}
        return ", ".join(f"{name}={length}" for name, length in lengths.items() if length > 1)

    def _say(self) -> None:
        layout, first = self._layout, ", ".join(map(str, self._layout.ranks[0].reshape(-1)))
        log.info(
            "grid: replicas=%d, %s; replica 0: ranks %s", self.replicas, self._in_words() or "one rank each", first
        )
        if layout.split:
            log.warning(
                "grid: the ranks of replica %s are on several hosts, although one host has room for a replica. Launch "
                "a multiple of %d ranks on each host: parts of one replica exchange more than replicas do.",
                ", ".join(map(str, layout.split)),
                layout.ranks[0].size,
            )


def _groups(layout: Layout) -> set[tuple[int, ...]]:
    """Return the groups of ranks that exchange something: along axes, within a replica, the ends of a message."""
    found = {group for axis in AXES for group in layout.groups(axis)} | set(layout.groups(*_WITHIN))
    for axes in (("shard",), ("tensor",), _DIVIDING):  # replicas and shards divide the data
        found |= set(layout.groups("replica", *axes))
    for stages in layout.groups("stage"):  # a stage sends to the next one; with several a rank, the last to the first
        found |= {(rank, stages[(index + 1) % len(stages)]) for index, rank in enumerate(stages) if len(stages) > 1}
    return found


def _kind(gradient: Tensor | None) -> int:
    if gradient is None:
        return 0
    return _SPARSE if gradient.is_sparse else _DENSE


def _norm(gradients: list[Tensor]) -> float:
    """Return the norm of tensors on one mesh, of all their parts."""
    return float(divided.whole(torch.nn.utils.get_total_norm(gradients)))

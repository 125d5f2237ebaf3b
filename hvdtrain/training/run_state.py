"""The state of a run besides `Adapter.state`: checkpoints and commits hold it, and a run resumes from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

from hvdtrain.adapter import Adapter
from hvdtrain.callbacks.base import RunId
from hvdtrain.data.generators import Generators
from hvdtrain.distributed import rank_state
from hvdtrain.distributed.world import World
from hvdtrain.training.checkpointing import Snapshot
from hvdtrain.training.optimizer_settings import OptimizerSettings
from hvdtrain.training.progress import History, RunProgress, check_data
from hvdtrain.training.rank_streams import RankStreams
from hvdtrain.training.validation import load_rank_state


class RunState:
    """The progress and history of a run, and this rank's random states.

    Attributes:
        run_id: of the current or last fit.
        resumed_from: the checkpoint's folder, or "in memory"; None for a run from the beginning.
        part: metrics of the last, incomplete epoch; None if the run has not ended within one.
        ended: the snapshot from which a longer run resumes, if this run has ended within an epoch; else None.
        shares: samples of a whole step by rank; None for equal parts.
        settings: the optimizer's settings that the run uses.
        generators: the random generators that the data hold, by the data's name; "train" is the training data.
    """

    def __init__(self, adapter: Adapter, config: dict[str, Any], world: World) -> None:
        self.run_id: RunId | None = None
        self.progress = RunProgress()
        self.history = History()
        self.resumed_from: str | None = None
        self.part: dict[str, float] | None = None
        self.ended: Snapshot | None = None
        self.shares: list[int] | None = None
        self.settings = OptimizerSettings(adapter)
        self.generators: dict[str, Generators] = {}
        self._adapter = adapter
        self._config = config
        self._world = world
        self._streams = RankStreams(adapter, world)
        self._facts: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None  # meta data of the checkpoint to resume from
        self._held: rank_state.Arrays = {}  # that checkpoint's arrays of this rank, to be loaded when steps begin
        self._random_at_begin: rank_state.Arrays = {}  # random states that the epoch's order was drawn from

    def snapshot(self, *, seconds: float, callbacks: Callable[[], list[Any]]) -> Snapshot:
        """Return what a checkpoint holds of the run.

        Args:
            seconds: training time of the epoch so far.
            callbacks: returns their states.
        """
        if self.ended is not None:
            return self.ended
        last = {name: values[-1] for name, values in self.history.items()}
        if self.progress.step:
            last = self.part or self.history.validated_after(self.progress.global_step)
        meta = {
            "config": self._config,
            "run": self.run_id and {"id": self.run_id.id, "name": self.run_id.name},
            "position": asdict(replace(self.progress, seconds=seconds)),
            "history": self.history,
            "validations": self.history.validations,
            "cutoffs": self.history.cutoffs,
            "settings": self.settings.used,
            "part": self.part,
            "metrics": last,
            "data": self._facts,
            "shares": self.shares,
            "callbacks": callbacks() if self._loaded is None else self._loaded["callbacks"],
        }
        begin = {f"begin.{name}": array for name, array in self._random_at_begin.items()}
        now = rank_state.random_states() | self._adapter.rank_state | self._of_data() | self._streams.saved()
        now |= begin if self.progress.step else {}
        return Snapshot(now | self._held, meta)  # what is still to be loaded replaces the current values

    def end_within_epoch(self, snapshot: Snapshot) -> None:
        """End the run within an epoch; a longer run resumes from `snapshot`, which later changes are no part of."""
        self.ended = replace(snapshot, meta={**snapshot.meta, "history": deepcopy(self.history)})

    def restore(self, found: Snapshot | None) -> None:
        """Restore the run's progress; None changes nothing."""
        if found is not None:
            self._loaded, self._held = found.meta, found.arrays
            self._facts = found.meta["data"]
            self.progress = RunProgress.from_json(found.meta["position"])
            self.history = History(found.meta["history"], found.meta.get("validations", ()), found.meta.get("cutoffs"))
            self.part, self.ended = found.meta.get("part"), None
            self.shares = found.meta.get("shares")

    def begin(self, facts: dict[str, Any], run_id: RunId) -> dict[str, Any]:
        """Begin a run with this data, or resume the one that was restored; return the checkpoint's meta data, or {}.

        Raises:
            CheckpointError: an epoch would resume with other data.
        """
        meta, self._loaded = self._loaded, None
        self._facts, self.ended = facts, None
        self.resumed_from = None if meta is None else meta.get("restored_from")
        known = None if meta is None else meta.get("run")
        self.run_id = RunId(**known, resumed=True) if known else run_id
        if meta is None:
            self.progress, self.history, self._held, self.part = RunProgress(), History(), {}, None
            return {}
        if self.progress.step:
            check_data(meta["data"], facts)
        return meta

    def describe_resume(self) -> list[str]:
        """Return a log line on which run is resumed, and from where; nothing for a run from the beginning."""
        if self.resumed_from is None or self.run_id is None:
            return []
        place = "the last commit" if self.resumed_from == "in memory" else self.resumed_from
        return [f"resumed run {self.run_id.name} from {place}, {self.progress.describe()}"]

    def describe_generators(self, *, saves: bool) -> list[str]:
        """Return warnings on generators of the data that resume otherwise, or will if `saves`."""
        unsaved = [f"{what} (of {name})" for name, each in self.generators.items() for what in each.unsaved]
        lines = [
            f"checkpoints do not hold {what}: a resumed run draws otherwise, and may repeat samples or leave them out. "
            "Let data draw from a torch.Generator, numpy.random.Generator or random.Random, or from set_epoch's epoch"
            for what in (unsaved if saves else ())
        ]
        unknown = self._of_data().keys() - self._held.keys() if self.resumed_from is not None else ()
        return lines + [
            f"the checkpoint does not hold {name.removeprefix(rank_state.OF_DATA)}, which is as the script made it: an "
            "older version wrote it, or the data were others. The run draws otherwise, and may repeat samples of its "
            "epoch or leave them out"
            for name in sorted(unknown)
        ]

    def begin_streams(self, *, in_threads: bool) -> None:
        """Give this rank random streams of its own; see `RankStreams.begin`."""
        own = self._config["rank_streams"]
        self._held = self._streams.begin(self._held, self.progress, is_own=own, in_threads=in_threads)

    def end_streams(self) -> None:
        """Let ranks draw alike after the run; a checkpoint that is saved then still holds their own streams."""
        self._held |= self._streams.end()

    def drawing_alike(self, place: str) -> AbstractContextManager[None]:
        """Let the block draw the same numbers on all ranks, at this place of the present epoch."""
        return self._streams.alike(place, self.progress.epoch)

    def load_held(self) -> None:
        """Restore this rank's random states and the adapter's state of this rank, if that is still to be done."""
        self._load(self._held)

    @contextmanager
    def drawing_order(self) -> Iterator[rank_state.Arrays]:
        """Let the block draw the epoch's order; yield the arrays of this rank with which the epoch resumes.

        A resumed epoch has the order that was drawn when it began.
        """
        held, self._held = self._held, {}
        resumes, now = self.progress.step > 0, self._streams.states()
        if resumes:
            begin = {name.removeprefix("begin."): held[name] for name in held if name.startswith("begin.")}
            self._load(self._streams.at_begin(begin))
        self._random_at_begin = self._streams.states() | self._of_data()
        yield held
        if resumes:
            train = self.generators.get("train")
            # What was read again has drawn again. On another number of ranks, a rank has read another part.
            self._load(now | held, but="train" if train is not None and train.replays else None)

    def _of_data(self) -> rank_state.Arrays:
        found = {f"{name}.{path}": a for name, each in self.generators.items() for path, a in each.states().items()}
        return {rank_state.OF_DATA + name: array for name, array in found.items()}

    def _load(self, arrays: rank_state.Arrays, *, but: str | None = None) -> None:
        load_rank_state(self._adapter, arrays)
        for name, generators in self.generators.items() if arrays else ():  # without arrays nothing is restored
            prefix = f"{rank_state.OF_DATA}{name}."
            if name != but:
                generators.set_states({n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)})

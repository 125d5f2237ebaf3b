"""The memory of a rank by what takes it, and the options that shrink each part: the Trainer's, or a script's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.distributed.compression import TYPES
from hvdtrain.errors import HvdTrainError
from hvdtrain.system import host_memory
from hvdtrain.system.quantities import format_size

# The fields of Parts, in words.
WORDS = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer state", "buckets": "buckets",
    "activations": "activations",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes of a rank by what takes them, at the moment of a step that takes most.

    Attributes:
        weights: parameters and buffers.
        gradients: of the weights that are trained.
        optimizer: the optimizer's state.
        buckets: copies of small gradients that are sent together, and what a compressor remembers.
        activations: what forward saves for backward, and whatever else a step takes; None if it is not known.
    """

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    buckets: float = 0
    activations: float | None = None

    @property
    def known(self) -> float:
        """The sum of all but activations."""
        return self.weights + self.gradients + self.optimizer + self.buckets

    @property
    def total(self) -> float:
        """The sum."""
        return self.known + (self.activations or 0)

    def largest_first(self) -> list[str]:
        """Return the names of the parts that are not empty."""
        found = [name for name in WORDS if getattr(self, name)]
        return sorted(found, key=lambda name: -getattr(self, name))

    def __str__(self) -> str:
        return ", ".join(f"{WORDS[name]} {format_size(getattr(self, name))}" for name in self.largest_first())


@dataclass(frozen=True, kw_only=True)
class Option:
    """A value of one of the Trainer's options with which a rank holds less.

    Attributes:
        name: of the option.
        value: as one writes it.
        divides: the parts of which each rank then holds 1/N.
        leaves: the share that is left of activations; None if it does not change them.
        casts: the share of the weights that are copied into another type, beside activations.
        does: what it does, to complete a sentence.
        elsewhere: what one writes instead for "keras" (the Trainer's, for a Keras model), "torch script" and "keras
            script" (without a Trainer); "" if there is nothing.
    """

    name: str
    value: str
    divides: Sequence[str] = ()
    leaves: float | None = None
    casts: float = 0
    does: str
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}={self.value}"

    @property
    def shrinks(self) -> list[str]:
        """The parts that it makes smaller."""
        return [*self.divides, *(["activations"] if self.leaves is not None else [])]

    def applied(self, parts: Parts, ranks: int) -> Parts:
        """Return what a rank of so many holds with it."""
        parts = replace(parts, **{part: getattr(parts, part) / ranks for part in self.divides})
        if self.leaves is None or parts.activations is None:
            return parts
        return replace(parts, activations=parts.activations * self.leaves + parts.weights * self.casts)


_SHARD_STATE = "hvd.DistributedOptimizer(shard_state=True)"
# Those that cost least come first; of one name one value can be chosen. How much is left of activations differs from
# model to model: docs/pages/memory.md has where these shares come from.
OPTIONS = (
    Option(
        name="micro_batch", value='"auto"', leaves=0.5, does="computes a batch in parts",
        elsewhere={
            "keras": "a smaller batch_size, with accumulate,",
            "torch script": "a smaller batch, with backward_passes_per_step,",
            "keras script": "a smaller batch_size, with backward_passes_per_step,",
        },
    ),
    Option(
        name="shard", value='"optimizer"', divides=["optimizer"], does="leaves 1/N of it on each of N ranks",
        elsewhere={"torch script": _SHARD_STATE, "keras script": _SHARD_STATE},
    ),
    Option(
        name="shard", value='"gradients"', divides=["gradients", "optimizer"],
        does="leaves 1/N of them on each of N ranks",
        elsewhere={"keras": "", "torch script": "", "keras script": ""},
    ),
    Option(
        name="checkpoint_activations", value='"blocks"', leaves=0.45,
        does="computes them again in backward",
        elsewhere={"torch script": "torch.utils.checkpoint", "keras script": "keras.remat"},
    ),
    Option(
        name="precision", value='"bf16"', leaves=0.5, casts=0.5, does="halves most of them",
        elsewhere={"torch script": "torch.autocast", "keras script": 'keras.config.set_dtype_policy("mixed_bfloat16")'},
    ),
)  # fmt: skip
# Of errors of compressed gradients, which are part of the buckets. Without such a compression there are none.
_WITHOUT_ERRORS = Option(
    name="compression", value='"fp16"', divides=["buckets"], does="keeps no errors of compressed gradients",
    elsewhere=dict.fromkeys(("torch script", "keras script"), "compression=hvd.Compression.fp16"),
)  # fmt: skip
_UNUSED = (None, False, "fp32")  # defaults of these options


@dataclass(frozen=True)
class Use:
    """The choices of a run on which it depends what an option would still save.

    Attributes:
        framework: "torch" or "keras".
        ranks: how many there are.
        options: the Trainer's, by name, as far as they were chosen.
        in_script: True without a Trainer. Then what a script does to its activations is not known.
    """

    framework: str
    ranks: int
    options: Mapping[str, Any]
    in_script: bool = False

    def options_for(self, part: str) -> list[Option]:
        """Return the options that would shrink a part, and do not do so already."""
        found = (*OPTIONS, _WITHOUT_ERRORS) if self.options.get("compression", "none") not in TYPES else OPTIONS
        return [o for o in found if self._way(o) and part in o.shrinks and part not in self._shrunk_by(o.name)]

    def _way(self, option: Option) -> str:
        """Return what one writes to use an option; "" if there is nothing."""
        place = f"{self.framework} script" if self.in_script else self.framework
        return option.elsewhere.get(place, str(option))

    def _shrunk_by(self, name: str) -> Sequence[str]:
        """Return the parts that an option shrinks by the value which the run has given it."""
        used = self.options.get(name)
        if used in _UNUSED or name == _WITHOUT_ERRORS.name:
            return ()
        same = (each.shrinks for each in OPTIONS if each.name == name and each.value == f'"{used}"')
        return next(same, list(WORDS))

    def advice(self, parts: Parts) -> str:
        """Return in words the largest part, and what shrinks it; if nothing does, the next such part."""
        names = parts.largest_first() or ["activations"]
        largest = f"The largest is {WORDS[names[0]]}"
        for part in names:
            # The first option costs least. A script may use one that is not known here, so name a second one.
            if found := self.options_for(part)[: 2 if self.in_script else 1]:
                what = ", or ".join(f"{self._way(each)} {self._does(each)}" for each in found)
                return f"{largest}: {what}" if part == names[0] else f"{largest}; of {WORDS[part]}, {what}"
        return f"{largest}, and no option is left that shrinks a part: take a smaller model"

    def _does(self, option: Option) -> str:
        return option.does.replace("N", str(self.ranks)) if self.ranks > 1 else option.does


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank holds between two steps, where its weights lie.

    Attributes:
        parts: without activations; gradients and state count also where they do not exist yet.
        missing: bytes of these parts that do not exist now.
        device: bytes that are in use on the device now, and at most so far; None if weights lie on the host.
    """

    parts: Parts
    missing: float = 0
    device: tuple[int, int] | None = None


class StepMemory:
    """Measures what steps take besides known parts: the most that is in use, less what was before the first step."""

    def __init__(self) -> None:
        self._others: float | None = None  # before the first step, besides the parts
        self._peak = self._before = 0
        self._device_before = 0  # the most in use on the device before the first step

    @property
    def has_begun(self) -> bool:
        """True after the first call of `begin`."""
        return self._others is not None

    def begin(self, held: Held) -> None:
        """Note what is in use before the first step; later calls do nothing."""
        if not self.has_begun:
            used, self._device_before = held.device or (host_memory.resident(), 0)
            self._others = used - (held.parts.known - held.missing)

    def begin_step(self) -> None:
        """Note the most so far: on the host only what rises within steps is theirs, not what checkpoints take."""
        self._before = host_memory.peak()

    def end_step(self) -> None:
        """Note a rise within the step."""
        if (peak := host_memory.peak()) > self._before:
            self._peak = peak

    def parts(self, held: Held, *, asked: float | None = None) -> Parts:
        """Return the parts, with activations as far as they are known.

        `asked` is what a step asked for in vain, beside what is in use now.
        """
        now, most = held.device or (host_memory.resident(), self._peak)
        peak: float = most if most > self._device_before or asked is not None else 0
        if asked is not None:
            peak = max(peak, now + asked)
        if self._others is None or not peak:
            return held.parts
        return replace(held.parts, activations=max(0.0, peak - self._others - held.parts.known))


_KINDS = ("OutOfMemoryError", "ResourceExhaustedError")  # of torch, of TensorFlow
_TEXTS = (
    "out of memory", "can't allocate memory", "not enough memory", "status_alloc_failed", "oom when allocating",
    "resource_exhausted",
)  # fmt: skip
_ASKED = re.compile(r"allocat\w* (?:request for )?([\d.]+) ?(bytes|[KMGT]i?B)\b")
_UNITS = {"bytes": 1.0} | {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", 1)}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was too small for this rank, on a GPU or on the host."""
    if isinstance(error, HvdTrainError):  # which tells all ranks of one rank's memory, in the same words
        return False
    is_said = isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)
    return is_said or isinstance(error, MemoryError) or any(each.__name__ in _KINDS for each in type(error).__mro__)


def asked_bytes(error: BaseException) -> float:
    """Return the bytes that could not be allocated; 0 if the error does not say."""
    found = _ASKED.search(str(error))
    return float(found[1]) * _UNITS.get(found[2], 0.0) if found else 0.0

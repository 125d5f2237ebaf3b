"""Turn the arguments of the Trainer and of `fit` into parts, and check them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.callbacks.base import CallbackList
from hvdtrain.callbacks.checkpoint import Checkpoint
from hvdtrain.callbacks.keras_style import as_callback
from hvdtrain.callbacks.loggers.logger import Logger
from hvdtrain.callbacks.progress import Progress
from hvdtrain.callbacks.run_folder import RunFolder
from hvdtrain.callbacks.stragglers import Stragglers
from hvdtrain.callbacks.sync_check import SyncCheck
from hvdtrain.distributed.compression import Scheme
from hvdtrain.distributed.compression import parse as parse_compression
from hvdtrain.sync.cutoff import Record
from hvdtrain.sync.strategy import Strategy
from hvdtrain.system import scratch
from hvdtrain.training import learning_rate
from hvdtrain.training.description import name_of
from hvdtrain.training.progress import Budget


def with_defaults(
    given: Sequence[Any], run_folder: RunFolder | None, checkpoint_dir: str | None, progress: bool
) -> CallbackList:
    """Return the user's callbacks, without those that write files under `hvdtrain bench`, and those of every run."""
    hooks = [as_callback(each) for each in given if not (scratch.is_on() and scratch.is_keras_writer(each))]
    for kind in (*[Progress] * progress, Stragglers, SyncCheck):
        if not any(isinstance(hook, kind) for hook in hooks):
            hooks.append(kind())
    if run_folder is not None and not any(isinstance(hook, RunFolder) for hook in hooks):
        hooks.append(run_folder)
    if scratch.is_on():
        hooks = [hook for hook in hooks if not isinstance(hook, RunFolder | Logger)]
    if checkpoint_dir:
        hooks.append(Checkpoint(checkpoint_dir))
    return CallbackList(hooks)


def as_config(
    *,
    lr_scaling: str,
    warmup_epochs: float,
    accumulate: int,
    clip_norm: float | None,
    precision: str,
    compression: Scheme | str,
    shard: str | None,
    nan_policy: str | None,
    micro_batch: int | str | None,
    sync: Strategy | None,
    cutoff: float | Record | None,
    checkpoint_activations: Any,
    seed: int,
    rank_streams: bool,
) -> dict[str, Any]:
    """Return the Trainer's options as JSON, which all ranks compare and checkpoints keep; ValueError for a bad one."""
    check_choice("precision", precision, ("fp32", "bf16", "fp16"))
    compression = str(parse_compression(compression))
    if shard is not None:
        check_choice("shard", shard, ("optimizer", "gradients"))
    if nan_policy is not None:
        check_choice("nan_policy", nan_policy, ("raise", "skip", "stop"))
    check_positive("accumulate", accumulate, int)
    if isinstance(micro_batch, str):
        check_choice("micro_batch", micro_batch, ("auto",))
    elif micro_batch is not None:
        check_positive("micro_batch", micro_batch, int)
    if clip_norm is not None:
        check_positive("clip_norm", clip_norm, float)
    if sync is not None and cutoff is not None:
        raise ValueError(f"cutoff is for ranks that reduce gradients in every step. Received: cutoff and sync={sync}")
    if not (isinstance(checkpoint_activations, bool) or checkpoint_activations == "blocks"):
        if not callable(checkpoint_activations) or isinstance(checkpoint_activations, type):
            raise ValueError(
                "checkpoint_activations must be False, True, 'blocks', or a function (module) -> bool. Received: "
                f"checkpoint_activations={checkpoint_activations!r}"
            )
        checkpoint_activations = name_of(checkpoint_activations)
    check_choice("lr_scaling", lr_scaling, tuple(learning_rate.FACTORS))
    if warmup_epochs < 0:
        raise ValueError(f"warmup_epochs must be >= 0. Received: warmup_epochs={warmup_epochs}")
    if seed < 0:
        raise ValueError(f"seed must be >= 0. Received: seed={seed}")
    if not isinstance(rank_streams, bool):
        raise ValueError(f"rank_streams must be True or False. Received: rank_streams={rank_streams!r}")
    return {
        "lr_scaling": lr_scaling, "warmup_epochs": float(warmup_epochs), "accumulate": int(accumulate),
        "clip_norm": clip_norm if clip_norm is None else float(clip_norm), "precision": precision,
        "compression": compression, "shard": shard, "nan_policy": nan_policy, "seed": int(seed),
        "rank_streams": rank_streams, "sync": sync and sync.config,
        "cutoff": cutoff if isinstance(cutoff, float) else None,  # a record is of this run alone
        "checkpoint_activations": checkpoint_activations,
        "micro_batch": int(micro_batch) if isinstance(micro_batch, np.integer) else micro_batch,
    }  # fmt: skip


def as_budget(epochs: int | None, steps: int | None, seconds: float | None) -> Budget:
    """Return the limits of a fit; without any, one epoch."""
    given: dict[str, tuple[Any, type]] = {"epochs": (epochs, int), "steps": (steps, int), "seconds": (seconds, float)}
    for name, (value, kind) in given.items():
        if value is not None:
            check_positive(name, value, kind)
    if epochs is steps is seconds is None:
        epochs = 1
    return Budget(epochs and int(epochs), steps and int(steps), seconds and float(seconds))


def as_class_weight(given: Any) -> dict[int, float] | None:
    """Return the weights by class; ValueError if they are not numbers >= 0 by the classes' numbers."""
    if given is None:
        return None
    try:
        weights = {operator.index(number): float(weight) for number, weight in given.items()}
        if all(0 <= weight < math.inf for weight in weights.values()):
            return weights
    except (AttributeError, TypeError, ValueError):
        pass
    raise ValueError(
        "class_weight must have a finite number >= 0 for each class's number, such as {0: 1.0, 1: 5.0}. "
        f"Received: class_weight={given!r}"
    )


def check_end(facts: dict[str, Any], budget: Budget) -> None:
    """Raise ValueError if neither the data (`Source.facts`) nor steps nor seconds end the run."""
    if facts.get("endless") and budget.steps is budget.seconds is None:
        raise ValueError(
            "train never ends, so epochs do not end the run. Received: an infinite dataset and "
            f"epochs={budget.epochs}. Give steps or seconds, or bound the data: .take(batches an epoch)"
        )


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}. Received: {name}={value!r}")


def check_positive(name: str, value: Any, kind: type) -> None:
    """Raise ValueError unless `value` is an int >= 1, or with `kind` float a number > 0."""
    kinds: Any = (int, np.integer) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
        wanted = "an int >= 1" if kind is int else "a number > 0"
        raise ValueError(f"{name} must be {wanted}. Received: {name}={value!r}")

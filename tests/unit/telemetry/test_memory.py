from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hvdtrain.errors import HvdTrainError, OtherRankError
from hvdtrain.system import host_memory
from hvdtrain.telemetry.memory import Held, Parts, StepMemory, Use, asked_bytes, is_out_of_memory

# What a script without a Trainer may write.
SMALLER_BATCH = "a smaller batch, with backward_passes_per_step, computes a batch in parts, or"
SMALLER_BATCH_SIZE = "a smaller batch_size, with backward_passes_per_step, computes a batch in parts, or"
SHARD_STATE = "hvd.DistributedOptimizer(shard_state=True) leaves 1/4 of it on each of 4 ranks"

ADAM = Parts(weights=1e9, gradients=1e9, optimizer=2e9, buckets=1e6, activations=0.5e9)


def use(framework: str = "torch", ranks: int = 4, *, in_script: bool = False, **options: Any) -> Use:
    return Use(framework, ranks, options, in_script)


def test_parts_are_said_with_the_largest_first() -> None:
    assert str(ADAM) == "optimizer state 2 GB, weights 1 GB, gradients 1 GB, activations 500 MB, buckets 1 MB"
    assert str(Parts(weights=8)) == "weights 8 B"


@pytest.mark.parametrize(
    ("parts", "of", "advice"),
    [
        (ADAM, use(), 'The largest is optimizer state: shard="optimizer" leaves 1/4 of it on each of 4 ranks'),
        (
            ADAM,
            use(ranks=1),
            'The largest is optimizer state: shard="optimizer" leaves 1/N of it on each of N ranks',
        ),
        (
            Parts(gradients=9, optimizer=8),
            use(shard="optimizer"),
            'The largest is gradients: shard="gradients" leaves 1/4 of them on each of 4 ranks',
        ),
        (
            Parts(optimizer=9, weights=8, activations=7),
            use(shard="optimizer"),
            'The largest is optimizer state; of activations, micro_batch="auto" computes a batch in parts',
        ),
        (
            Parts(weights=1, activations=9),
            use(micro_batch=8, shard="optimizer"),
            'The largest is activations: checkpoint_activations="blocks" computes them again in backward',
        ),
        (
            Parts(weights=1, activations=9),
            use(micro_batch="auto", checkpoint_activations=lambda module: True, precision="fp32"),
            'The largest is activations: precision="bf16" halves most of them',
        ),
        (
            Parts(weights=1, activations=9),
            use("keras", checkpoint_activations=False),
            "The largest is activations: a smaller batch_size, with accumulate, computes a batch in parts",
        ),
        (
            Parts(optimizer=9, weights=1),
            use("keras"),
            'The largest is optimizer state: shard="optimizer" leaves 1/4 of it on each of 4 ranks',
        ),
        (
            Parts(gradients=9, weights=1),
            use("keras"),
            "The largest is gradients, and no option is left that shrinks a part: take a smaller model",
        ),
        (
            Parts(weights=1, activations=9),
            use(in_script=True),
            f"The largest is activations: {SMALLER_BATCH} torch.utils.checkpoint computes them again in backward",
        ),
        (
            Parts(weights=1, activations=9),
            use("keras", in_script=True),
            f"The largest is activations: {SMALLER_BATCH_SIZE} keras.remat computes them again in backward",
        ),
        (
            ADAM,
            use(in_script=True),
            f"The largest is optimizer state: {SHARD_STATE}",
        ),
        (
            Parts(gradients=9, optimizer=8),
            use("keras", in_script=True),
            f"The largest is gradients; of optimizer state, {SHARD_STATE}",
        ),
        (
            Parts(optimizer=9, gradients=8),
            use(in_script=True, shard="optimizer"),
            "The largest is optimizer state, and no option is left that shrinks a part: take a smaller model",
        ),
        (
            Parts(buckets=9, weights=8),
            use(in_script=True, compression="topk:0.01"),
            "The largest is buckets: compression=hvd.Compression.fp16 keeps no errors of compressed gradients",
        ),
        (
            Parts(buckets=9, weights=8),
            use(compression="int8"),
            'The largest is buckets: compression="fp16" keeps no errors of compressed gradients',
        ),
    ],
)
def test_the_largest_part_is_named_with_the_option_that_shrinks_it(parts: Parts, of: Use, advice: str) -> None:
    assert of.advice(parts) == advice


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Set what this process has in memory now, and had at most."""

    def put(now: int, most: int) -> None:
        monkeypatch.setattr(host_memory, "resident", lambda: now)
        monkeypatch.setattr(host_memory, "peak", lambda: most)

    return put


BEFORE = Held(parts=Parts(weights=100, gradients=100, optimizer=200), missing=300)


def test_activations_are_what_steps_take_besides_the_parts(host: Callable[[int, int], None]) -> None:
    steps = StepMemory()
    host(1100, 1500)  # 1000 for other things, which took more before
    steps.begin(BEFORE)
    assert steps.parts(BEFORE).activations is None
    host(1300, 1500)
    steps.begin_step()
    steps.end_step()
    assert steps.parts(BEFORE).activations is None, "no step has taken more than was taken before"
    host(1300, 2000)
    steps.end_step()
    assert steps.parts(BEFORE).activations == 2000 - 1000 - 400


def test_what_a_checkpoint_takes_between_steps_is_no_activation(host: Callable[[int, int], None]) -> None:
    steps = StepMemory()
    host(1100, 1100)
    steps.begin(BEFORE)
    steps.begin_step()
    host(1300, 1700)
    steps.end_step()
    host(1300, 9000)  # a checkpoint is written
    steps.begin_step()
    steps.end_step()
    assert steps.parts(BEFORE).activations == 300


def test_on_a_gpu_its_own_figures_count(host: Callable[[int, int], None]) -> None:
    host(10**9, 10**9)
    steps = StepMemory()
    steps.begin(dataclasses.replace(BEFORE, device=(150, 150)))
    assert steps.parts(dataclasses.replace(BEFORE, device=(150, 150))).activations is None
    assert steps.parts(dataclasses.replace(BEFORE, device=(400, 1450))).activations == 1000


def test_what_could_not_be_allocated_counts_too(host: Callable[[int, int], None]) -> None:
    steps = StepMemory()
    host(1100, 5000)
    steps.begin(BEFORE)
    host(1200, 5000)
    assert steps.parts(BEFORE, asked=2300).activations == 1200 + 2300 - 1000 - 400


class ResourceExhaustedError(Exception):
    """As TensorFlow's, by its name."""


@pytest.mark.parametrize(
    ("error", "is_one", "asked"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), True, 2.5 * 2**30),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), True, 4096),
        (RuntimeError("not enough memory: you tried to allocate 12 bytes."), True, 12),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 134217728 bytes."), True, 2**27),
        (MemoryError("Unable to allocate 128. MiB for an array with shape (4,)"), True, 2**27),
        (RuntimeError("RESOURCE_EXHAUSTED: Failed to allocate request for 1.50GiB (1610612736B)"), True, 1.5 * 2**30),
        (ResourceExhaustedError("failed to allocate memory"), True, 0),
        (MemoryError(), True, 0),
        (RuntimeError("shapes differ"), False, 0),
        (ValueError("out of memory"), False, 0),
        (OtherRankError(1, "RuntimeError: CUDA out of memory"), False, 0),
        (HvdTrainError("rank 1 (h) ran out of memory with a single sample at once"), False, 0),
    ],
)
def test_an_error_of_memory_is_found_by_class_or_text(error: Exception, is_one: bool, asked: float) -> None:
    assert is_out_of_memory(error) is is_one
    assert asked_bytes(error) == asked

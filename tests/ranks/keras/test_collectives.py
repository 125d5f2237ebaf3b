"""Horovod's functions on single values, on every backend."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd
from hvdtrain.keras import basics, ops

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.every_backend]


def _value(tensor):
    return np.asarray(keras.ops.convert_to_numpy(tensor), np.float64)


def test_allreduce_averages_sums_and_scales():
    mine = np.array([1.0, 2.0], "float32") * (hvd.rank() + 1)
    total = hvd.size() * (hvd.size() + 1) / 2
    expected = np.array([1.0, 2.0]) * total
    np.testing.assert_allclose(_value(hvd.allreduce(mine)), expected / hvd.size(), rtol=1e-6)
    np.testing.assert_allclose(_value(hvd.allreduce(mine, op=hvd.Sum)), expected)
    np.testing.assert_allclose(_value(hvd.allreduce(mine, average=False, name="again")), expected)
    np.testing.assert_allclose(_value(hvd.allreduce(mine, op=hvd.Max)), np.array([1.0, 2.0]) * hvd.size())
    np.testing.assert_allclose(
        _value(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)), expected * 2
    )
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        reduced = hvd.allreduce(mine, op=hvd.Sum, compression=compression)
        np.testing.assert_allclose(_value(reduced), expected)
        assert keras.backend.standardize_dtype(reduced.dtype) == "float32"


def test_allreduce_takes_bfloat16():
    reduced = hvd.allreduce(keras.ops.cast(np.ones(3, "float32"), "bfloat16"), op=hvd.Sum)
    assert keras.backend.standardize_dtype(reduced.dtype) == "bfloat16"
    assert _value(keras.ops.cast(reduced, "float32")).tolist() == [hvd.size()] * 3


def test_the_other_collectives():
    rank, size = hvd.rank(), hvd.size()
    gathered = hvd.allgather(np.full((rank + 1, 2), rank, "float32"))
    assert _value(gathered)[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert _value(hvd.broadcast(np.array([rank, 5]), size - 1)).tolist() == [size - 1, 5]
    scattered = hvd.reducescatter(np.arange(size * 2, dtype="float32").reshape(size, 2) * (rank + 1), op=hvd.Sum)
    total = size * (size + 1) / 2
    assert _value(scattered).tolist() == [[2 * rank * total, (2 * rank + 1) * total]]
    assert _value(hvd.alltoall(np.arange(size) + 10 * rank)).tolist() == [10 * r + rank for r in range(size)]
    rows, counts = hvd.alltoall(np.full(sum(range(size + 1)), rank), splits=np.arange(1, size + 1))
    assert _value(counts).tolist() == [rank + 1] * size
    assert _value(rows).tolist() == [r for r in range(size) for _ in range(rank + 1)]
    assert hvd.broadcast_object({"epoch": rank}, root_rank=size - 1) == {"epoch": size - 1}
    assert hvd.allgather_object([rank]) == [[r] for r in range(size)]
    hvd.barrier()


def test_a_host_array_is_replaced_by_each_roots_part_in_its_place():
    array = np.full(12 * hvd.size(), hvd.rank(), np.float32)
    parts = np.split(array.view(np.uint8), hvd.size())
    for wait in [ops.broadcast_in_place(part, root, name=f"in-place.{root}") for root, part in enumerate(parts)]:
        wait()
    assert array.tolist() == np.repeat(range(hvd.size()), 12).tolist()


def test_constants_are_horovods():
    module = basics.running()
    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
        assert getattr(hvd, name) == getattr(module, name)
    assert hvd.global_process_set.size() == hvd.size() == basics.members(None)
    assert hvd.cross_size() * hvd.local_size() == hvd.size()
    assert hvd.gloo_built() == bool(module.gloo_built())
    assert hvd.is_initialized()


def test_every_name_of_horovods_keras_modules_is_there():
    import ast
    import importlib.util
    from pathlib import Path

    root = Path(importlib.util.find_spec("horovod").origin).parent
    for module in ("keras", "tensorflow/keras"):
        for file, where in (("__init__.py", hvd), ("callbacks.py", hvd.callbacks), ("elastic.py", hvd.elastic)):
            tree = ast.parse((root / module / file).read_text())
            names = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
            for node in tree.body:
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod.tensorflow"):
                    names |= {alias.name for alias in node.names}
            names -= {"TensorFlowKerasState"}
            assert not [name for name in sorted(names) if not hasattr(where, name)]

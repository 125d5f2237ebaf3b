"""Functions that compiled JAX steps call, on the memory of the step's arrays or on copies of it."""

from __future__ import annotations

import logging

import numpy as np
import pytest

keras = pytest.importorskip("keras")
if keras.backend.backend() != "jax":  # which starts threads, and warns of each fork of the tests that follow
    pytest.skip("XLA calls functions on JAX alone", allow_module_level=True)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import io_callback  # noqa: E402

from hvdtrain.keras.backends import host_calls  # noqa: E402


@pytest.fixture(params=["memory", "copies"])
def way(request, monkeypatch):
    assert host_calls._works()
    if request.param == "copies":
        monkeypatch.setattr(host_calls, "_works", lambda: False)
    return request.param


def like(*arrays):
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def double(arguments, results):
    for result in results:
        result *= 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4), (300, 300)])
def test_results_that_take_an_arguments_memory_have_its_value(way, dtype, shape):
    given = (jnp.arange(np.prod(shape, dtype=int)) % 7).astype(dtype).reshape(shape)
    step = jax.jit(lambda x: host_calls.call(double, like(x), [x + 1], in_place=True)[0])
    assert step(given).dtype == given.dtype
    np.testing.assert_array_equal(step(given), (given + 1) * 2)


def test_arguments_are_not_copied_and_cannot_be_changed():
    found = []

    def function(arguments, results):
        found.append((arguments[0].flags.writeable, arguments[0].ctypes.data == results[0].ctypes.data))
        results[1][:] = arguments[1]

    step = jax.jit(lambda x, y: host_calls.call(function, like(x, y), [x + 1, y], in_place=True))
    step(jnp.ones(3), jnp.ones(4))
    assert found == [(False, True)]


def test_results_take_the_memory_of_tensors_that_are_not_used_again():
    """And of those that are, not: they keep their value."""
    at = {}

    def function(arguments, results):
        at["result"] = results[0].ctypes.data
        results[0][:] = arguments[0].sum()

    def step(x, room):
        return host_calls.call(function, like(room), [x], rooms=[room])[0]

    x, room = jnp.arange(3.0), jnp.zeros((2, 4))
    (at["room"],) = (shard.data.unsafe_buffer_pointer() for shard in room.addressable_shards)
    assert jax.jit(step)(x, room).tolist() == [[3.0] * 4] * 2
    assert at["result"] != at["room"]
    assert not room.any()
    assert jax.jit(step, donate_argnums=1)(x, room).tolist() == [[3.0] * 4] * 2
    assert at["result"] == at["room"]


def test_rooms_are_not_copied_to_the_host_where_results_cannot_take_them(monkeypatch):
    monkeypatch.setattr(host_calls, "_works", lambda: False)

    def function(arguments, results):
        assert len(arguments) == 1
        results[0][:] = arguments[0].sum()

    step = jax.jit(lambda x, room: host_calls.call(function, like(room), [x], rooms=[room])[0])
    assert step(jnp.arange(3.0), jnp.zeros((2, 4))).tolist() == [[3.0] * 4] * 2


def test_a_tensor_that_is_used_again_keeps_its_value(way):
    @jax.jit
    def step(x):
        y = x + 1
        (z,) = host_calls.call(double, like(y), [y], in_place=True)
        return y, z, x

    np.testing.assert_array_equal(jnp.stack(step(jnp.arange(4.0))), [[1, 2, 3, 4], [2, 4, 6, 8], [0, 1, 2, 3]])


def test_calls_that_do_not_depend_on_each_other_keep_their_order(way):
    """Ranks that called in another order would wait for each other for ever."""
    order = []

    def named(name):
        return lambda arguments, results: order.append(name)

    @jax.jit
    def step(x):
        io_callback(lambda: order.append("first"), None, ordered=True)
        found = []
        for i in range(12):
            busy = x[i % 3] @ x[i % 3] if i % 2 else x[0]
            found += host_calls.call(named(i), like(busy), [busy], in_place=True)
            io_callback(lambda i=i: order.append(f"after {i}"), None, ordered=True)
        return found

    x = jnp.ones((3, 150, 150))
    for _ in range(10):
        order.clear()
        jax.block_until_ready(step(x))
        jax.effects_barrier()
        assert order == ["first"] + [each for i in range(12) for each in (i, f"after {i}")]


def test_a_function_in_a_branch_is_called_if_the_branch_is_taken(way):
    calls = []

    def function(arguments, results):
        calls.append(1)
        results[0][:] = arguments[0] + 1

    @jax.jit
    def step(flag, x):
        return jax.lax.cond(flag, lambda x: host_calls.call(function, like(x), [x])[0], lambda x: x, x)

    assert step(True, jnp.zeros(2)).tolist() == [1, 1]
    assert step(False, jnp.zeros(2)).tolist() == [0, 0]
    assert len(calls) == 1


def test_an_error_fails_the_step_with_its_traceback_and_the_next_one_runs(way):
    def function(arguments, results):
        if arguments[0][0] > 1:
            raise RuntimeError("rank 3 has ended")
        results[0][:] = arguments[0]

    step = jax.jit(lambda x: host_calls.call(function, like(x), [x])[0])
    with pytest.raises(Exception, match=r"(?s)Traceback.*in function.*RuntimeError: rank 3 has ended"):
        jax.block_until_ready(step(jnp.full(2, 2.0)))
    assert step(jnp.ones(2)).tolist() == [1, 1]


def test_outside_of_a_compiled_step_functions_get_copies():
    x = jnp.ones(3)
    assert host_calls.call(double, like(x), [x], in_place=True)[0].tolist() == [2, 2, 2]
    assert x.tolist() == [1, 1, 1]


def test_another_jaxlib_that_cannot_call_is_said_in_the_log_and_steps_copy(monkeypatch, caplog):
    monkeypatch.setattr(host_calls, "_version", lambda: (1, 0))
    with caplog.at_level(logging.INFO, "hvdtrain"):
        assert not host_calls._works.__wrapped__()
    assert f"JAX {jax.__version__}: steps copy gradients from XLA's memory and back" in caplog.text
    assert "Received: 1.0" in caplog.text

"""A fast figure of a peer that trains wrongly never reaches a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import catalog, turns
from benchmarks.groups import GroupError
from benchmarks.steps import compare

DDP = next(peer for peer in catalog.TORCH if peer.name == "ddp")


def answer(change: np.ndarray[Any, Any], *, digest: str = "a", loss: float = 2.0) -> dict[str, Any]:
    return {"update": turns.project([change]).tolist(), "digest": digest, "loss": loss}


@pytest.fixture
def change() -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).standard_normal(200_000).astype(np.float32)


def test_a_peer_that_equals_one_process_up_to_rounding_passes(change: np.ndarray[Any, Any]) -> None:
    rounded = change * (1 + 1e-6)
    check = compare(DDP, [answer(rounded), answer(rounded)], answer(change))
    assert check["ranks_equal"]
    assert check["update_error"] == pytest.approx(1e-6, rel=0.2)


def test_ranks_with_different_weights_are_refused(change: np.ndarray[Any, Any]) -> None:
    with pytest.raises(GroupError, match="ranks hold different weights"):
        compare(DDP, [answer(change), answer(change, digest="b")], answer(change))


def test_a_peer_that_steps_on_other_gradients_is_refused(change: np.ndarray[Any, Any]) -> None:
    other = change + 0.2 * np.random.default_rng(2).standard_normal(change.size).astype(np.float32)
    with pytest.raises(GroupError, match=r"first 5 steps are \d+\.\d% off those of one process"):
        compare(DDP, [answer(other)] * 2, answer(change))


def test_a_peer_with_another_loss_is_refused(change: np.ndarray[Any, Any]) -> None:
    with pytest.raises(GroupError, match=r"its loss is 2\.100000 instead of 2\.000000"):
        compare(DDP, [answer(change, loss=2.1)] * 2, answer(change))


def test_the_digest_sees_one_bit(change: np.ndarray[Any, Any]) -> None:
    other = change.copy()
    other[-1] = np.nextafter(other[-1], np.float32(np.inf))
    assert turns.digest([change]) == turns.digest([change.copy()])
    assert turns.digest([change]) != turns.digest([other])


def test_the_summary_of_weights_is_linear_and_sees_where_a_change_is() -> None:
    first, second = np.zeros(100_000, np.float32), np.zeros(100_000, np.float32)
    first[3], second[80_000] = 1, 1
    assert turns.project([first + second]) == pytest.approx(turns.project([first]) + turns.project([second]))
    assert not np.array_equal(turns.project([first]), turns.project([second]))

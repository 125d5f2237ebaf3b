"""The layers of a model are divided among stages by their bytes, or at names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hvdtrain.torch.grid.split import split


def layers(*widths):
    """Linear layers with so many numbers; 0 for a layer without parameters."""
    made = (nn.Linear(width, 1, bias=False) if width else nn.Tanh() for width in widths)
    return {str(index): layer for index, layer in enumerate(made)}


@pytest.mark.parametrize(
    ("widths", "stages", "largest"),
    [
        ((4, 4, 4, 4), 2, 8),
        ((8, 1, 1, 1), 2, 8),
        ((1, 1, 1, 8), 2, 8),
        ((4, 0, 4, 0), 2, 4),
        ((0, 0, 5, 5), 2, 5),
        ((1, 2, 3, 4, 5, 6), 3, 9),
        ((7, 7), 1, 14),
    ],
)
def test_the_largest_stage_is_as_small_as_possible(widths, stages, largest):
    found = split(layers(*widths), stages)
    assert max(sum(widths[int(name)] for name in part) for part in found) == largest
    assert [name for part in found for name in part] == [str(index) for index in range(len(widths))]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=7), st.integers(2, 4))
def test_every_layer_is_in_one_stage_and_no_other_division_has_a_smaller_largest(widths, stages):
    if sum(map(bool, widths)) < stages:
        with pytest.raises(ValueError, match="Each stage needs a layer with parameters"):
            split(layers(*widths), stages)
        return
    found = split(layers(*widths), stages)
    assert [name for part in found for name in part] == [str(index) for index in range(len(widths))]
    largest = max(sum(widths[int(name)] for name in part) for part in found)
    assert largest == min(_divisions(widths, stages))


def _divisions(widths, stages):
    """Yield the largest part of each division in which each part has parameters."""
    if stages == 1:
        if sum(widths):
            yield sum(widths)
        return
    for end in range(1, len(widths)):
        if sum(widths[:end]):
            yield from (max(sum(widths[:end]), rest) for rest in _divisions(widths[end:], stages - 1))


def test_stages_begin_at_the_layers_that_are_named():
    assert split(layers(8, 1, 1, 1), 3, ["2", "3"]) == [["0", "1"], ["2"], ["3"]]


@pytest.mark.parametrize("at", [["9"], ["2", "1"], ["0", "1"], ["1"], ["1", "1"]])
def test_names_that_do_not_make_the_stages_are_refused(at):
    with pytest.raises(ValueError, match=r"at= takes the names of 2 layers, in order"):
        split(layers(1, 1, 1, 1), 3, at)


def test_a_stage_without_parameters_is_refused():
    with pytest.raises(ValueError, match="Received: stage 1 of 2"):
        split(layers(2, 2, 0), 2, ["2"])


def test_a_parameter_of_two_stages_is_refused_and_one_of_two_layers_of_a_stage_is_not():
    tied = layers(4, 4, 4, 4)
    tied["1"].weight = tied["0"].weight
    assert len(split(tied, 2)) == 2
    tied["3"].weight = tied["0"].weight
    with pytest.raises(ValueError, match=r"Received: 0.weight of stage 0 is 3.weight of stage 1"):
        split(tied, 2, ["2"])

"""What DistributedOptimizer is given is checked before anything starts."""

from __future__ import annotations

import pytest
import torch


def model():
    return torch.nn.Linear(2, 1)


def test_named_parameters_of_another_model(hvd):
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"lacks 2 of the optimizer's 2 parameters.*another model"):
        hvd.DistributedOptimizer(optimizer, model().named_parameters())


def test_a_model_without_parameters(hvd):
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="without parameters"):
        hvd.DistributedOptimizer(optimizer, torch.nn.ReLU().named_parameters())
    optimizer.param_groups.clear()
    with pytest.raises(ValueError, match="no parameters"):
        hvd.DistributedOptimizer(optimizer)


def test_names_given_twice_and_no_names(hvd):
    m = model()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Received twice: p"):
        hvd.DistributedOptimizer(optimizer, [("p", m.weight), ("p", m.bias)])
    with pytest.raises(ValueError, match="Received: Parameter"):
        hvd.DistributedOptimizer(optimizer, m.parameters())


@pytest.mark.parametrize(("options", "message"), [
    ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0. Received: 0"),
    ({"gradient_predivide_factor": 2.0, "op": 1}, "needs op=Average"),
    ({"groups": -1}, "number >= 0"),
    ({"groups": "two"}, "Received: 'two'"),
    ({"groups": [["weight"]]}, "parameters only"),
])  # fmt: skip
def test_options_out_of_range(hvd, options, message):
    m = model()
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters(), **options)


def test_a_parameter_in_two_groups(hvd):
    m = model()
    with pytest.raises(ValueError, match="one group only"):
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), groups=[[m.weight], [m.weight]])


def test_passes_per_step_is_checked_later_too(hvd):
    m = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters())
    with pytest.raises(ValueError, match="Received: 0"):
        optimizer.set_backward_passes_per_step(0)


def test_old_words_still_work_and_say_so(hvd):
    m = model()
    with pytest.warns(DeprecationWarning, match="Use groups"):
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters(), num_groups=1)
    with pytest.warns(DeprecationWarning, match="op=hvd.Sum"):
        hvd.allreduce(torch.ones(1), average=False)
    with pytest.raises(ValueError, match="supersedes"):
        hvd.allreduce(torch.ones(1), average=False, op=hvd.Sum)


def test_a_step_that_other_code_replaced_is_reported(hvd):
    m = model()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    optimizer.step = lambda closure=None: None
    with pytest.warns(UserWarning, match="was replaced on the object"):
        hvd.DistributedOptimizer(optimizer, m.named_parameters())

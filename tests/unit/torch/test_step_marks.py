from __future__ import annotations

from types import SimpleNamespace

import torch

from hvdtrain.torch.step_marks import _StepMarks


def test_a_sparse_gradient_counts_as_a_dense_one():
    facts = {}
    marks = _StepMarks(SimpleNamespace(facts=facts, recorder=SimpleNamespace(step_done=lambda: None)))
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    marks.stepped(torch.optim.SGD(table.parameters(), lr=1), (), {})
    marks.ignore_batch()
    assert facts["gradient_bytes"] == 5 * 2 * 4

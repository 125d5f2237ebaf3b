"""Hooks around an optimizer's step, for an optimizer that steps with parts of weights.

torch calls hooks within `step`, where parameter groups hold parts. A hook expects whole weights and whole gradients:
`torch.nn.utils.clip_grad_norm_` over parts would clip each rank's gradients by another norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

Hooks = list[Callable[..., Any]]


@contextmanager
def taken_out(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Hooks, Hooks]]:
    """Within it, torch calls no hook of a step; the hooks before and after a step are what the block gets."""
    everywhere_before = torch_optimizer._global_optimizer_pre_hooks
    everywhere_after = torch_optimizer._global_optimizer_post_hooks
    own_before, own_after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    before, after = (everywhere_before, own_before), (own_after, everywhere_after)  # in torch's order
    held: list[tuple[Any, dict[int, Any]]] = [(registered, dict(registered)) for registered in (*before, *after)]
    for registered, _ in held:
        registered.clear()
    try:
        yield (
            [hook for _, hooks in held[:2] for hook in hooks.values()],
            [hook for _, hooks in held[2:] for hook in hooks.values()],
        )
    finally:
        for registered, hooks in held:
            registered.update(hooks)


def call_before(
    hooks: Hooks, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call hooks before a step; return its arguments, which a hook may replace as torch's documentation says."""
    for hook in hooks:
        given = hook(optimizer, (optimizer, *args), kwargs)
        if given is not None:
            (_, *new_args), kwargs = given
            args = tuple(new_args)
    return args, kwargs

"""Take a step under loss scaling, and tell whether the scaler has skipped it, which torch does not say."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvdtrain.torch.reduction.tensors import Whole


def step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Callable[[], bool]:
    """Take the step unless the gradients are not finite; the function returns whether it was taken.

    The scaler reads on the host whether to call the optimizer, so the answer costs nothing. It calls a fused optimizer
    for GPUs always, which then skips on the GPU: there the function waits for the GPU, if it is called.
    """
    if not scaler.is_enabled():
        scaler.step(optimizer)
        return lambda: True
    found: list[torch.Tensor | None] = []
    hook = optimizer.register_step_post_hook(lambda each, *_: found.append(getattr(each, "found_inf", None)))
    try:
        scaler.step(optimizer)
    finally:
        hook.remove()
    return lambda: any(found_inf is None or not bool(found_inf) for found_inf in found)


def unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, tensors: Whole) -> None:
    """Divide the gradients by the scale; if a number on any rank is not finite, the scaler of each rank learns it."""
    scaler.unscale_(optimizer)
    if scaler.is_enabled():
        found = scaler._found_inf_per_device(optimizer)
        if not found and tensors.is_divided:  # all of this part is frozen, and the scaler asks for a finding
            found[str(scaler._device)] = torch.zeros((), dtype=torch.float32, device=scaler._device)
        for found_inf in found.values():
            tensors.add_up(found_inf)

"""Tensors that torch has divided over ranks (DTensor): this rank's part of them, and the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.data.trees import leaves


def is_divided(tensor: Any) -> bool:
    """Return whether torch has divided a tensor; DTensor's module takes half a second to import."""
    return hasattr(tensor, "device_mesh")


def is_over(tensor: Any, axis: str) -> bool:
    """Return whether torch has divided a tensor over a mesh with this axis, or over one whose axes have no names."""
    return is_divided(tensor) and axis in (tensor.device_mesh.mesh_dim_names or (axis,))


def is_averaged_over(tensor: Any, axis: str) -> bool:
    """Return whether torch averages a divided tensor's gradient along this axis in backward."""
    return is_divided(tensor) and axis in (tensor.device_mesh.mesh_dim_names or ())


def has_parts_along(tensor: Any, axis: str) -> bool:
    """Return whether ranks along this axis have other parts of a tensor; taken for true if its mesh has no names."""
    if not is_over(tensor, axis):
        return False
    names = tensor.device_mesh.mesh_dim_names
    return names is None or not tensor.placements[names.index(axis)].is_replicate()


def others_with_parts(tensor: Any) -> set[int]:
    """Return the ranks that hold other parts of a divided tensor than this rank."""
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    along = zip(tensor.placements, place, strict=True)
    ranks = mesh.mesh[tuple(at if each.is_replicate() else slice(None) for each, at in along)]
    return set(ranks.flatten().tolist()) - {int(mesh.mesh[tuple(place)])}


def is_uneven_along(tensor: Any, axis: str) -> bool:
    """Return whether torch has divided a tensor along this axis into parts of unequal sizes."""
    names: Sequence[str] = (tensor.device_mesh.mesh_dim_names or ()) if is_divided(tensor) else ()
    if axis not in names:
        return False
    index = names.index(axis)
    how = tensor.placements[index]
    return bool(how.is_shard() and tensor.shape[how.dim] % tensor.device_mesh.shape[index])


def local(tensor: Any) -> Any:
    """Return this rank's part of a divided tensor, which shares its memory; another tensor as it is."""
    return tensor.to_local() if is_divided(tensor) else tensor


def whole(tensor: Any) -> Any:
    """Return the whole of a divided tensor; another one as it is. A collective of the ranks that have parts."""
    return tensor.full_tensor() if is_divided(tensor) else tensor


def of_part(part: Tensor, placements: Any, owner: Any) -> Any:
    """Return a tensor of a divided one's shape, of which `part` is this rank's; no collective."""
    from torch.distributed.tensor import DTensor

    how = {"run_check": False, "shape": owner.shape, "stride": owner.stride()}
    return DTensor.from_local(part, owner.device_mesh, placements, **how)


def like(tensor: Tensor, divided: Any) -> Any:
    """Divide a whole tensor, which these ranks have alike, as another one of its shape is divided; no collective."""
    if not is_divided(divided):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    placed = tensor.to(divided.to_local().device)
    return distribute_tensor(placed, divided.device_mesh, divided.placements, src_data_rank=None)


def reshard(model: nn.Module) -> None:
    """Let `fully_shard` free the weights that it has gathered: a model's parameters are then this rank's parts.

    After a forward pass without a backward pass it keeps the whole weights of the outermost module.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def reduce_in_backward(model: nn.Module) -> None:
    """Let `fully_shard` reduce gradients and free weights in backward, whatever an earlier loop has set."""
    for module in _fsdp_modules(model):
        module.set_requires_gradient_sync(True, recurse=False)
        module.set_reshard_after_backward(True, recurse=False)
        module.set_is_last_backward(True)


def class_of(module: nn.Module) -> type:
    """Return a module's class; of a layer that `fully_shard` has divided, the class that it had before."""
    kind = type(module)
    return kind.__bases__[-1] if _is_fsdp(module) else kind


class ZeroGradients:
    """Gives the layers of `fully_shard` gradients of zeros in a backward pass over a loss that does not count.

    A loss times 0 does not, if it is NaN: its gradient may be NaN too, and the ranks of a shard group add theirs up.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(_fsdp_modules(model))
        self._applies = False

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Within it, the model computes what the backward pass goes back through."""
        handles = [module.register_forward_hook(self._see) for module in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Within it, the gradients of what the layers have returned are zeros."""
        self._applies = True
        try:
            yield
        finally:
            self._applies = False

    def _see(self, module: nn.Module, args: Any, outputs: Any) -> None:
        for each in leaves(outputs):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(self._replace)

    def _replace(self, gradient: Tensor) -> Tensor | None:
        return torch.zeros_like(gradient) if self._applies else None


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """Yield the layers that `fully_shard` has divided."""
    return filter(_is_fsdp, model.modules())


def _is_fsdp(module: nn.Module) -> bool:
    """Return whether `fully_shard` has divided a layer, without importing the class that it gives to it."""
    return hasattr(module, "set_reshard_after_backward")

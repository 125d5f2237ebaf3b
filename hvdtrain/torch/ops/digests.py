"""Digests of tensors, taken on the device that holds them; see `hvdtrain.distributed.checksums`."""

from __future__ import annotations

import torch
from torch import Tensor

from hvdtrain.distributed import checksums

_WORD = 8  # bytes


@torch.no_grad()
def of_tensor(tensor: Tensor, *, on_device: bool | None = None) -> bytes:
    """Return the digest of a tensor's bits, type and shape; equal tensors on a GPU and on the host have the same.

    Args:
        tensor: any that a checkpoint can hold.
        on_device: sum up blocks where the tensor is; by default on a GPU. Then their sums and the last, incomplete
            block are copied to the host.
    """
    on_device = tensor.device.type != "cpu" if on_device is None else on_device
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    data = tensor.reshape(-1).view(torch.uint8)
    sums = _sums_of_blocks(data) if on_device else torch.empty(0, dtype=torch.int64, device="cpu")
    done = sums.numel() // sum(checksums.LANES) * checksums.BLOCK * _WORD
    rest = data[done:].cpu().numpy()
    return checksums.of_parts(f"{tensor.dtype}{tuple(tensor.shape)}", sums.cpu().numpy().data, rest)


def _sums_of_blocks(data: Tensor) -> Tensor:
    """Return the sums of lanes of each complete block of bytes, on their device: int64, shape (blocks, 1023).

    `data` is uint8, of shape (bytes,). Integers wrap around in any order of additions to the same sum.
    """
    count = data.numel() // (checksums.BLOCK * _WORD)
    data = data[: count * checksums.BLOCK * _WORD]
    if data.data_ptr() % _WORD or data.storage_offset() % _WORD:  # a view of a part of another tensor
        data = data.clone()
    words = data.view(torch.int64)
    return torch.cat([words.view(count, checksums.BLOCK // lanes, lanes).sum(1) for lanes in checksums.LANES], 1)

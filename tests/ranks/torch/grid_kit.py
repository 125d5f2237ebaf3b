"""A transformer's block, the ways to divide a model of them, and the world of one process, for the tests of a Grid."""

from contextlib import contextmanager

import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hvdtrain.distributed import world as worlds

WIDTH, HEAD, TOKENS = 16, 4, 3


class Block(nn.Module):
    """A transformer's block: attention and an MLP, each behind a norm."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        # heads: (batch, heads of this rank, tokens, HEAD)
        normed = self.norms[0](x)
        heads = [part(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


PLAN = {name: ColwiseParallel() for name in ("q", "k", "v", "up")} | {
    name: RowwiseParallel() for name in ("out", "down")
}


def staged(net, grid, schedule="1f1b"):
    return grid.pipeline(net, micro_batches=3, schedule=schedule)


def divided(net, grid):
    for layer in net.children():
        if isinstance(layer, Block):
            parallelize_module(layer, grid.mesh("tensor"), PLAN)
    return net


@contextmanager
def one_process():
    """Within it, this rank trains alone, as a script without a launcher."""
    before = worlds.current()
    worlds.use(worlds.SoloWorld())
    try:
        yield
    finally:
        worlds.use(before)

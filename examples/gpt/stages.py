"""A small GPT that several ranks hold together: in stages of a pipeline, or in shards. One process trains it too.

    python stages.py                                   # one process
    horovodrun -np 2 python stages.py --stages 2       # one replica: half of the layers on each rank
    horovodrun -np 4 python stages.py --stages 2       # two replicas
    horovodrun -np 2 python stages.py --shards 2       # each rank holds half of every weight

All print the same perplexity, and resume from each other's checkpoints. The text is that of train.py, in pieces of one
length: a pipeline passes tensors of one shape from stage to stage.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import nn
from train import LENGTH, TOKENS, Block, load

import hvdtrain
import hvdtrain.torch


class Embedding(nn.Module):
    """The first layer: what a token means, and where it stands."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, width) for ids (batch, length)."""
        return self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))


class Logits(nn.Module):
    """The last layer: scores of the token after each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, TOKENS, length), with the classes where torch's loss expects them."""
        return self.linear(self.norm(x)).transpose(1, 2).clone()


def make_model(width: int = 64, heads: int = 4, blocks: int = 4) -> nn.Sequential:
    """Return the layers, as a pipeline divides them."""
    torch.manual_seed(0)
    return nn.Sequential(Embedding(width), *(Block(width, heads) for _ in range(blocks)), Logits(width))


def pieces(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text as ids and targets, both (pieces, LENGTH): a target is the token after its input."""
    text = torch.cat(rows)
    count = (len(text) - 1) // LENGTH
    return text[: count * LENGTH].view(count, LENGTH), text[1 : count * LENGTH + 1].view(count, LENGTH)


def main() -> None:
    """Train, resume if there is a checkpoint, and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=1, help="ranks of a replica, each with some of the layers")
    parser.add_argument("--shards", type=int, default=1, help="ranks of a replica, each with a part of every weight")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a pipeline; %(default)s")
    parser.add_argument("--epochs", type=int, default=2, help="in all, with those before a checkpoint; %(default)s")
    parser.add_argument("--batch-size", type=int, default=16, help="pieces of text a step, over all ranks; %(default)s")
    parser.add_argument("--checkpoints", default="checkpoints/gpt-stages", metavar="DIR", help="%(default)s")
    args = parser.parse_args()

    world = hvdtrain.init(seed=0)
    replicas = world.size
    model: nn.Module = make_model()
    if args.stages > 1 or args.shards > 1:
        grid = hvdtrain.torch.Grid(stages=args.stages, shard=args.shards)
        replicas = grid.data_size  # that have data of their own
        if args.stages > 1:
            model = grid.pipeline(make_model(), micro_batches=args.micro_batches)
        else:
            from torch.distributed.fsdp import fully_shard

            for layer in model:
                fully_shard(layer, mesh=grid.mesh("shard"))
            fully_shard(model, mesh=grid.mesh("shard"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.1)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=nn.CrossEntropyLoss(), clip_norm=1.0)
    train, test = map(pieces, load())
    size = args.batch_size // replicas
    trainer.fit(train, epochs=args.epochs, batch_size=size, checkpoint_dir=args.checkpoints)
    loss = trainer.evaluate(test, batch_size=size)["loss"]
    if world.is_root:
        print(f"ranks {world.size}, stages {args.stages}, shards {args.shards}: perplexity {math.exp(loss):.4f}")


if __name__ == "__main__":
    main()

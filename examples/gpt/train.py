"""A small GPT on English text: a step of its own with token counts, gradient accumulation, and a sample at the end.

    python train.py                       # one process
    horovodrun -np 2 python train.py      # the same perplexity
    hvdtrain run -np 2 train.py           # also starts again when a process dies; the same command resumes

The text is Python's own language reference, which comes with Python (`help("for")` shows a page of it). A token is a
character. Paragraphs differ in length, so ranks and micro-batches hold different numbers of tokens: `step` returns the
count, and the gradient is the mean over all tokens of a step, wherever they are.
"""

from __future__ import annotations

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import hvdtrain

TOKENS, LENGTH = 128, 96  # ASCII; the longest sequence that the model reads
PADDING = -100  # as a target: no token


class Block(nn.Module):
    """Causal attention, then a layer for each token by itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what comes in plus what was learned: (batch, length, width)."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each: (batch, heads, length, width / heads)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Predicts the next token at each place."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, length, TOKENS), of the token after each of `ids`, (batch, length)."""
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        return self.norm(self.blocks(x)) @ self.token.weight.T

    @torch.no_grad()
    def write(self, text: str, count: int, seed: int = 0) -> str:
        """Return `text` and `count` characters more."""
        generator, device = torch.Generator().manual_seed(seed), self.token.weight.device
        ids = [ord(each) for each in text]
        for _ in range(count):
            logits = self(torch.tensor([ids[-LENGTH:]], device=device))[0, -1]
            ids.append(int(torch.multinomial(torch.softmax(logits.cpu() / 0.7, 0), 1, generator=generator)))
        return "".join(map(chr, ids))


def load() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the paragraphs to train and to test, int64 tensors of different lengths; every rank gets all of them."""
    pages = (topics[name].encode("ascii", "ignore").decode() for name in sorted(topics))
    paragraphs = [" ".join(each.split()) for page in pages for each in page.split("\n\n")]
    prose = [each for each in paragraphs if len(each) > 20 and not {"|", "=", "*"} & set(each)]  # no tables, no code
    rows = [torch.tensor([ord(letter) for letter in each[: LENGTH + 1]]) for each in prose]
    return rows[64:], rows[:64]


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return inputs and targets, (batch, longest of the batch): a target is the token after its input."""
    inputs = pad_sequence([row[:-1] for row in rows], batch_first=True)
    return {"ids": inputs, "targets": pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=PADDING)}


def step(model: GPT, batch: dict[str, torch.Tensor]) -> hvdtrain.Loss:
    """Return the mean loss of this batch's tokens, and how many they are."""
    logits, targets = model(batch["ids"]), batch["targets"]
    count = (targets != PADDING).sum()
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
    return hvdtrain.Loss(total / count.clamp(min=1), count=count)


def main() -> None:
    """Train, resume if there is a checkpoint, test, and write a sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="in all, with those before a checkpoint; %(default)s")
    parser.add_argument("--batch-size", type=int, default=16, help="paragraphs a step, over all ranks; %(default)s")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step; %(default)s")
    parser.add_argument("--lr", type=float, default=0.005, help="%(default)s")
    parser.add_argument("--checkpoints", default="checkpoints/gpt", metavar="DIR", help="%(default)s")
    args = parser.parse_args()

    world = hvdtrain.init(seed=0)  # before the model is made: picks this rank's GPU
    torch.manual_seed(0)
    train, test = load()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, step=step, accumulate=args.accumulate, clip_norm=1.0)
    size = args.batch_size // (world.size * args.accumulate)  # paragraphs of a rank's micro-batch
    loader = DataLoader(train, batch_size=size, shuffle=True, collate_fn=collate)
    trainer.fit(loader, epochs=args.epochs, checkpoint_dir=args.checkpoints)
    loss = trainer.evaluate(DataLoader(test, batch_size=size, collate_fn=collate))["loss"]
    if world.is_root:  # only output here, never a collective
        model.eval()
        print(f"ranks {world.size}: perplexity {math.exp(loss):.4f}\n{model.write('The statement ', 60)!r}", flush=True)


if __name__ == "__main__":
    main()

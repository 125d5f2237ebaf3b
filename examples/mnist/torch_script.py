"""A PyTorch script written for Horovod. The only change is the import of hvdtrain.torch.

horovodrun -np 2 python torch_script.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mnist_data
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdtrain.torch as hvd


class Net(torch.nn.Module):
    """Two convolutions and a linear layer; takes images of shape (batch, 1, side, side)."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.linear = torch.nn.Linear(32 * (side // 4) ** 2, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits: (batch, 10)."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.linear(x.flatten(1))


def evaluate(model: Net, images: mnist_data.Images, device: str) -> tuple[float, float]:
    """Return loss and accuracy over all images; each rank takes every size-th of them."""
    x = torch.from_numpy(images.x[hvd.rank() :: hvd.size()]).unsqueeze(1).to(device)
    y = torch.from_numpy(images.y[hvd.rank() :: hvd.size()]).to(device)
    model.eval()
    with torch.no_grad():
        logits = model(x)
    loss = functional.cross_entropy(logits, y, reduction="sum")
    correct = (logits.argmax(1) == y).sum()
    # Sums, not means: shards may differ in length, and a mean of means would weight them wrongly.
    totals = hvd.allreduce(torch.stack([loss, correct.float()]), op=hvd.Sum, name="evaluate") / len(images.y)
    return totals[0].item(), totals[1].item()


def main() -> None:
    """Train on this rank's shard, test, save on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step; default: %(default)s")
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate; default: %(default)s")
    parser.add_argument("--save", default="checkpoints/mnist.pt", metavar="FILE", help="default: %(default)s")
    mnist_data.add_arguments(parser)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    device = "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())  # one GPU per rank
        device = "cuda"

    train, test = mnist_data.load_or_exit(args)
    dataset = TensorDataset(torch.from_numpy(train.x).unsqueeze(1), torch.from_numpy(train.y))
    # It repeats a few samples, so that all shards have the same length. hvdtrain.prepare repeats none.
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    model = Net(side=train.x.shape[1]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    # Every rank starts with rank 0's weights, and applies the mean of all ranks' gradients.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()

    loss, accuracy = evaluate(model, test, device)  # call it on every rank: it calls allreduce
    if hvd.rank() == 0:  # only I/O in here
        path = Path(args.save)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
        print(f"ranks {hvd.size()}  loss {loss:.4f}  accuracy {accuracy:.4f}  saved {path}", flush=True)


if __name__ == "__main__":
    main()

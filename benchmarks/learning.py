"""Compare what strategies of synchronization learn: held-out loss on MNIST after equal samples, over several seeds.

    python -m benchmarks.learning --data-dir DIR

DIR has MNIST's IDX files, or a part of them. Each strategy trains the same model on two ranks, with the same samples in
the same order; a seed decides weights and order. "none" are gradients in every step, and the spread of its seeds is
what a strategy's loss is compared with. The speed of a slow link is another measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hvdtrain

# A name of the table, and the Trainer's arguments.
STRATEGIES: dict[str, dict[str, Any]] = {
    "none": {},
    "none, fp16": {"compression": "fp16"},
    "none, int8": {"compression": "int8"},
    "none, topk:0.01": {"compression": "topk:0.01"},
    "none, topk:0.1": {"compression": "topk:0.1"},
    "none, powersgd:4:78": {"compression": "powersgd:4:78"},
    "Delayed()": {"sync": {"strategy": "Delayed"}},
    "LocalSGD(8)": {"sync": {"strategy": "LocalSGD", "every": 8}},
    "LocalSGD(32)": {"sync": {"strategy": "LocalSGD", "every": 32}},
    "LocalSGD(32, after_steps=78)": {"sync": {"strategy": "LocalSGD", "every": 32, "after_steps": 78}},
    "LocalSGD(32), fp16": {"sync": {"strategy": "LocalSGD", "every": 32}, "compression": "fp16"},
    "DiLoCo(32)": {"sync": {"strategy": "DiLoCo", "every": 32}},
    "DiLoCo(100)": {"sync": {"strategy": "DiLoCo", "every": 100}},
    "DiLoCo(32, fragments=4, overlap=6)": {"sync": {"strategy": "DiLoCo", "every": 32, "fragments": 4, "overlap": 6}},
    **{
        f"{kind}({every}), {scheme}": {"sync": {"strategy": kind, "every": every}, "compression": scheme}
        for kind, every in (("LocalSGD", 8), ("DiLoCo", 32))
        for scheme in ("int8", "topk:0.01", "powersgd:4:0")
    },
}


def mlp(width: int) -> Any:
    """Return an MLP over an image's pixels."""
    from torch import nn

    hidden = [nn.Linear(28 * 28, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


def transformer() -> Any:
    """Return a transformer to which the 28 rows of an image are tokens: 2 layers of width 128, 400,000 parameters."""
    import torch
    from torch import nn

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(28, 128)
            self.places = nn.Parameter(0.02 * torch.randn(28, 128))
            layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.classes = nn.Linear(128, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:  # 28 * 28 numbers for each image
            tokens = self.embed(images.view(len(images), 28, 28)) + self.places
            return self.classes(self.layers(tokens).mean(1))  # (batch, 10)

    return Rows()


def train(options: argparse.Namespace) -> None:
    """Train one strategy with one seed on this rank, and write the result down."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "mnist"))
    import mnist_data

    world = hvdtrain.init("torch", seed=options.seed)
    train, test = mnist_data.load(data_dir=options.data_dir)
    torch.manual_seed(options.seed)
    model = transformer() if options.model == "transformer" else mlp(options.width)
    if options.model == "transformer":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), options.lr)
    else:
        optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=options.momentum)
    loss = torch.nn.CrossEntropyLoss()
    strategy = STRATEGIES[options.strategy]
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=loss, metrics=["accuracy"], **strategy)
    trainer.fit(train, epochs=options.epochs, batch_size=options.batch_size, progress=False, run_dir=None)
    result = trainer.evaluate(test)
    if world.is_root:
        Path(options.result).write_text(json.dumps({**result, "steps": trainer.global_step}))


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Train each strategy with each seed; return the results by strategy, one a seed."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.only or STRATEGIES}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        for seed in range(options.seeds):
            for name in found:
                own = ["--strategy", name, "--seed", str(seed), "--result", str(result)]
                command = ["horovodrun", "-np", "2", sys.executable, "-m", "benchmarks.learning", *sys.argv[1:], *own]
                one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=one_thread, capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(f"{name}, seed {seed}: exit status {done.returncode}\n{done.stderr[-2000:]}")
                found[name].append(json.loads(result.read_text()))
                print(f"{name}, seed {seed}: loss {found[name][-1]['loss']:.4f}", flush=True)
    return found


def show(found: dict[str, list[dict[str, float]]]) -> None:
    """Print a row for each strategy: medians, and the range over seeds."""
    print(f"\n{'strategy':36}  {'loss':>7}  {'over seeds':>16}  {'accuracy':>8}")
    for name, results in found.items():
        losses = [each["loss"] for each in results]
        accuracy = statistics.median(each["accuracy"] for each in results)
        span = f"{min(losses):.4f} - {max(losses):.4f}"
        print(f"{name:36}  {statistics.median(losses):7.4f}  {span:>16}  {accuracy:8.4f}")


def main() -> None:
    """Measure and print, or, started by a launcher, train."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--data-dir", required=True, help="folder of MNIST's IDX files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--model", choices=["mlp", "transformer"], default="mlp", help="transformer: by Adam")
    parser.add_argument("--width", type=int, default=4096, help="of the MLP's two hidden layers: 20M parameters")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--only", action="append", choices=STRATEGIES, help="a strategy; may be given again")
    parser.add_argument("--strategy", choices=STRATEGIES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.strategy:
        train(options)
    else:
        show(measure(options))


if __name__ == "__main__":
    main()

"""The cases of scripts/same_bits.py, which runs this file on each rank."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import hvdtrain
from hvdtrain.callbacks import EMA, Checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from stopping import StopAt, StoppedError

SAMPLES, BATCH, EPOCHS, STOP = 53, 4, 2, 3
TIMES = {"samples_per_s", "seconds"}


@dataclass(frozen=True)
class Case:
    """A model, the Trainer's options, and fit's; `make` gets the options that must be made anew for each run."""

    model: Callable[[], Any]
    options: Callable[[Any], dict[str, Any]]
    fit: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], Any] | None = None
    sizes: tuple[int, ...] = (2, 3)
    resumes: bool = True


def digest(arrays: Mapping[str, Any]) -> str:
    """Return a hash of arrays and their names."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()[:16]


def hashes(trainer: Any, history: Mapping[str, Any]) -> dict[str, str]:
    """Return hashes of what a fit has left."""
    arrays = trainer.state().arrays
    metrics = {name: repr([float(each) for each in values]) for name, values in history.items() if name not in TIMES}
    return {
        "weights": digest({name: each for name, each in arrays.items() if name.startswith("model.")}),
        "state": digest({name: each for name, each in arrays.items() if not name.startswith("model.")}),
        "metrics": hashlib.sha256(repr(sorted(metrics.items())).encode()).hexdigest()[:16],
    }


def arrays(samples: int = SAMPLES) -> tuple[Any, Any]:
    """Return inputs (samples, 6), float32, and classes of 3."""
    generator = np.random.default_rng(1)
    return generator.normal(size=(samples, 6)).astype(np.float32), generator.integers(0, 3, samples)


def with_nan() -> tuple[Any, Any]:
    """Return the same with one sample that is not finite."""
    x, y = arrays()
    x[30] = np.nan
    return x, y


def run(case: Case, folder: Path) -> dict[str, str]:
    """Train straight, and from a checkpoint; return the hashes."""
    found = train(case)
    if case.resumes:
        try:
            train(case, callbacks=[Checkpoint(str(folder), every_steps=1), StopAt(STOP)])
        except StoppedError:
            pass
        else:
            raise AssertionError("the run did not stop")
        found |= {f"resumed {name}": each for name, each in train(case, callbacks=[Checkpoint(str(folder))]).items()}
    return found


def train(case: Case, callbacks: Any = ()) -> dict[str, str]:
    """Train once; return the hashes."""
    seed_all()
    net = case.model()
    options = case.options(net)
    own = options.pop("callbacks", ())
    trainer = hvdtrain.Trainer(net, seed=3, **options)
    given = {"epochs": EPOCHS, "batch_size": BATCH, "progress": False, "run_dir": None, **case.fit}
    data = (case.data or arrays)()
    return hashes(trainer, trainer.fit(data, callbacks=[*own, *callbacks], **given))


def seed_all() -> None:
    """Seed everything that draws, the same on all ranks."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - what users' datasets draw from
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(0)


SYNCS: dict[str, Any] = {
    "local_sgd": lambda: hvdtrain.LocalSGD(every=3),
    "local_sgd later": lambda: hvdtrain.LocalSGD(every=2, after_steps=3),
    "diloco": lambda: hvdtrain.DiLoCo(every=3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "clip": {"clip_norm": 0.5},
    "accumulate clip fp16": {"accumulate": 2, "clip_norm": 0.5, "compression": "fp16"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "compression fp16": {"compression": "fp16"},
    "compression bf16": {"compression": "bf16"},
    "compression int8": {"compression": "int8"},
    "compression topk": {"compression": "topk:0.1"},
    "compression powersgd": {"compression": "powersgd:1:3"},
    "shard": {"shard": "optimizer", "clip_norm": 0.5},
    "linear warmup": {"lr_scaling": "linear", "warmup_epochs": 1.5},
    "one stream": {"rank_streams": False},
}
FITS: dict[str, dict[str, Any]] = {
    "balance": {"balance": [2, 1]},
    "steps": {"epochs": None, "steps": 9},
    "validation": {"validation": arrays(22), "validate_every": 3},
}


def torch_cases() -> dict[str, Case]:
    """Return the cases of the Trainer on PyTorch."""
    import torch
    from torch import nn

    import hvdtrain.torch as hvd

    def net(*, norm: bool = True) -> Any:
        middle = [nn.BatchNorm1d(16)] if norm else []
        return nn.Sequential(nn.Linear(6, 16), *middle, nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))

    def with_sync_norm() -> Any:
        made = net()
        made[1] = hvd.SyncBatchNorm(16)
        return made

    def frozen() -> Any:
        made = net()
        made[0].weight.requires_grad_(False)
        return made

    def sparse() -> Any:
        return nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Flatten(), nn.Linear(4, 3))

    def sgd(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def adam(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def options(model: Any, *, make: Any = sgd, **more: Any) -> dict[str, Any]:
        given = {"optimizer": make(model), "metrics": ["accuracy"], **more}
        return given if "step" in given else {"loss": nn.CrossEntropyLoss(), **given}

    def strategy(model: Any, *, sync: Any, make: Any = sgd, **more: Any) -> dict[str, Any]:
        return options(model, make=make, sync=sync(), **more)

    def own_step(model: Any, batch: Any) -> Any:
        x, y = batch
        keep = y != 2
        outputs = model(x)
        total = nn.functional.cross_entropy(outputs[keep], y[keep], reduction="sum")
        return hvdtrain.Loss(total / keep.sum().clamp(min=1), count=keep.sum(), outputs=outputs, targets=y)

    def two_steps(models: Any, batch: Any) -> Iterator[Any]:
        x, y = batch
        hidden = models["a"](x)
        yield "a", hvdtrain.Loss(hidden.square().mean())
        outputs = models["b"](models["a"](x).detach())
        yield "b", hvdtrain.Loss(nn.functional.cross_entropy(outputs, y), outputs=outputs, targets=y)
        loss = nn.functional.cross_entropy(models["b"](models["a"](x)), y)
        yield ("a", "b"), hvdtrain.Loss(loss, outputs=outputs, targets=y)

    def two_models() -> Any:
        return {"a": nn.Linear(6, 5), "b": nn.Linear(5, 3)}

    def two_optimizers(models: Any, **more: Any) -> dict[str, Any]:
        made = {"a": sgd(models["a"]), "b": adam(models["b"])}
        return {"optimizer": made, "step": two_steps, "metrics": ["accuracy"], **more}

    def lbfgs(model: Any) -> Any:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)

    def ids() -> Any:
        x = torch.arange(SAMPLES)[:, None] % 8
        return x, x[:, 0] % 3

    def ignored() -> Any:
        x, y = arrays()
        y[::5] = -100
        return x, y

    cases = {name: Case(net, partial(options, **each)) for name, each in OPTIONS.items()}
    cases |= {f"adam {name}": Case(net, partial(options, make=adam, **each)) for name, each in OPTIONS.items()}
    cases |= {f"fit {name}": Case(net, options, fit=each) for name, each in FITS.items() if name != "balance"}
    cases["fit balance"] = Case(net, options, fit={"balance": [2, 1]}, sizes=(2,))
    cases["fit balance of three"] = Case(net, options, fit={"balance": [3, 1, 2]}, sizes=(3,))
    cases["frozen"] = Case(frozen, options)
    cases["sparse"] = Case(sparse, partial(options, make=plain_sgd), data=ids)
    cases["ignored labels"] = Case(net, options, data=ignored)
    cases["nan skip"] = Case(net, partial(options, nan_policy="skip"), data=with_nan)
    cases["nan skip accumulate"] = Case(net, partial(options, nan_policy="skip", accumulate=2), data=with_nan)
    cases["micro batches"] = Case(net, partial(options, micro_batch=3))
    cases["micro batches auto"] = Case(net, partial(options, micro_batch="auto", nan_policy="skip"), data=with_nan)
    cases["sync norm"] = Case(with_sync_norm, options)
    cases["sync norm accumulate"] = Case(with_sync_norm, partial(options, accumulate=2, clip_norm=0.5))
    again = partial(
        options, checkpoint_activations=lambda layer: isinstance(layer, nn.BatchNorm1d | hvd.SyncBatchNorm | nn.Dropout)
    )
    cases["checkpointed"] = Case(net, partial(again, nan_policy="skip"), data=with_nan)
    cases["checkpointed sync norm"] = Case(with_sync_norm, partial(again, accumulate=2, precision="bf16"))
    cases["own step"] = Case(net, partial(options, step=own_step))
    cases["own step accumulate fp16"] = Case(net, partial(options, step=own_step, accumulate=2, precision="fp16"))
    cases["two optimizers"] = Case(two_models, two_optimizers)
    skips = partial(two_optimizers, nan_policy="skip", clip_norm=1.0)
    cases["two optimizers skip"] = Case(two_models, skips, data=with_nan)
    cases["lbfgs"] = Case(partial(net, norm=False), partial(options, make=lbfgs))
    cases["ema"] = Case(net, lambda model: options(model, callbacks=[EMA(0.9)]))
    cuts = {1: [1, 2, 2], 4: [2, 0, 1]}
    for size in (2, 3):
        cutoff = {step: counts[:size] for step, counts in cuts.items()}
        others = {"cutoff skip": {"nan_policy": "skip"}, "cutoff clip": {"clip_norm": 0.5}}
        for name, more in {"cutoff": {}, **others}.items():
            given = partial(options, cutoff=cutoff, accumulate=2, **more)
            data = with_nan if "skip" in name else None
            cases[f"{name} of {size}"] = Case(partial(net, norm=False), given, data=data, sizes=(size,))
    for name, sync in SYNCS.items():
        cases[name] = Case(net, partial(strategy, sync=sync))
        cases[f"{name} adam"] = Case(net, partial(strategy, sync=sync, make=adam))
        cases[f"{name} accumulate fp16"] = Case(net, partial(strategy, sync=sync, accumulate=2, compression="fp16"))
        cases[f"{name} skip"] = Case(net, partial(strategy, sync=sync, nan_policy="skip"), data=with_nan)
    streaming = partial(hvdtrain.DiLoCo, every=4, fragments=2, overlap=1)
    cases["diloco streaming"] = Case(net, partial(strategy, sync=streaming))
    cases["diloco streaming int8"] = Case(net, partial(strategy, sync=streaming, compression="int8"))
    cases["local_sgd topk"] = Case(net, partial(strategy, sync=SYNCS["local_sgd later"], compression="topk:0.1"))
    cases["diloco powersgd"] = Case(net, partial(strategy, sync=SYNCS["diloco"], compression="powersgd:1:1"))
    within = partial(hvdtrain.LocalSGD, every=3, within="host")
    cases["local_sgd within"] = Case(net, partial(strategy, sync=within, accumulate=2, clip_norm=0.5))
    delayed = partial(strategy, sync=hvdtrain.Delayed)
    for name, more in OPTIONS.items():
        cases[f"delayed {name}"] = Case(net, partial(delayed, **more))
    cases["delayed adam"] = Case(net, partial(delayed, make=adam))
    cases["delayed skip"] = Case(net, partial(delayed, nan_policy="skip"), data=with_nan)
    cases["delayed own step"] = Case(net, partial(delayed, step=own_step))
    cases["delayed micro batches"] = Case(net, partial(delayed, micro_batch=3))
    cases["delayed balance"] = Case(net, delayed, fit={"balance": [2, 1]}, sizes=(2,))
    cases["delayed frozen"] = Case(frozen, delayed)
    return cases


def plain_sgd(model: Any) -> Any:
    """Return an SGD that takes sparse gradients."""
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.1)


def torch_functions() -> dict[str, Callable[[], dict[str, str]]]:
    """Return the cases of the drop-in and of `prepare`: functions that return hashes."""
    import torch
    from torch import nn

    import hvdtrain.torch as hvd

    def net() -> Any:
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def drop_in(*, passes: int = 1, **given: Any) -> dict[str, str]:
        seed_all()
        model = net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=passes,
            **given,
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        x, y = map(torch.from_numpy, arrays(60))
        for step in range(0, 12 - passes + 1, passes):
            optimizer.zero_grad()
            for each in range(step, step + passes):
                rows = slice(5 * each + hvd.rank(), 5 * each + 5, hvd.size())
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        return {"weights": digest({name: each.numpy() for name, each in model.state_dict().items()})}

    def prepared() -> dict[str, str]:
        seed_all()
        rows = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays()))
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
        model, optimizer, loader = hvdtrain.prepare(model, sgd, loader)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        return {"weights": digest({name: each.numpy() for name, each in model.state_dict().items()})}

    return {
        "drop-in": drop_in,
        "drop-in passes": partial(drop_in, passes=3),
        "drop-in fp16": partial(drop_in, compression=hvd.Compression.fp16),
        "drop-in bf16": partial(drop_in, compression=hvd.Compression.bf16),
        "drop-in int8": partial(drop_in, compression=hvd.Compression.int8),
        "drop-in topk": partial(drop_in, compression=hvd.Compression.topk(0.1)),
        "drop-in powersgd": partial(drop_in, compression=hvd.Compression.powersgd(1, after_steps=2)),
        "drop-in shards": partial(drop_in, shard_state=True),
        "drop-in sum": partial(drop_in, op=hvd.Sum),
        "drop-in groups": partial(drop_in, num_groups=2),
        "drop-in predivide": partial(drop_in, gradient_predivide_factor=2.0),
        "prepare": prepared,
        **({"drop-in adasum": partial(drop_in, op=hvd.Adasum)} if hvd.size() == 2 else {}),  # a power of two
    }


def keras_cases() -> dict[str, Case]:
    """Return the cases of the Trainer on Keras."""
    import keras

    def net() -> Any:
        layers = keras.layers
        middle = layers.BatchNormalization(), layers.Activation("tanh"), layers.Dropout(0.2)
        return keras.Sequential([keras.Input((6,)), layers.Dense(8), *middle, layers.Dense(3)])

    def options(_: Any, *, sync: Any = None, adam: bool = False, **more: Any) -> dict[str, Any]:
        sgd = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01)
        return {
            "optimizer": keras.optimizers.Adam(0.01) if adam else sgd,
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
            "sync": None if sync is None else sync(),
            **more,
        }

    cases = {name: Case(net, partial(options, **each)) for name, each in OPTIONS.items()}
    cases["adam"] = Case(net, partial(options, adam=True))
    cases["fit balance"] = Case(net, options, fit={"balance": [2, 1]}, sizes=(2,))
    cases["fit validation"] = Case(net, options, fit=FITS["validation"])
    cases["fit class weight"] = Case(net, options, fit={"class_weight": {0: 2.0, 1: 0.5}})
    cases["nan skip"] = Case(net, partial(options, nan_policy="skip"), data=with_nan)
    cases["local_sgd"] = Case(net, partial(options, sync=SYNCS["local_sgd"]))
    cases["local_sgd topk"] = Case(net, partial(options, sync=SYNCS["local_sgd later"], compression="topk:0.1"))
    cases["diloco powersgd"] = Case(net, partial(options, sync=SYNCS["diloco"], compression="powersgd:1:1"))
    cases["diloco adam fp16"] = Case(net, partial(options, sync=SYNCS["diloco"], adam=True, compression="fp16"))
    return cases


def main() -> None:
    """Run the cases whose names hold one of the words, and write their hashes."""
    framework, folder, *words = sys.argv[1:]
    world = hvdtrain.init(framework)
    cases = torch_cases() if framework == "torch" else keras_cases()
    functions = torch_functions() if framework == "torch" else {}
    found = {}
    for name, case in cases.items():
        if world.size in case.sizes and is_wanted(name, words):
            found[name] = attempt(partial(run, case, Path(folder) / name.replace(" ", "-")), name)
    for name, function in functions.items():
        if is_wanted(name, words):
            found[name] = attempt(function, name)
    (Path(folder) / f"hashes-{world.rank}.json").write_text(json.dumps(found))
    world.barrier()


def is_wanted(name: str, words: list[str]) -> bool:
    """Return whether a name holds one of the words, or there are none."""
    return not words or any(word in name for word in words)


def attempt(function: Callable[[], dict[str, str]], name: str) -> dict[str, str]:
    """Return a case's hashes; an option that is refused is a result, too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function()
    except (ValueError, TypeError) as error:
        return {"refused": str(error).partition(".")[0]}
    except Exception as error:
        raise RuntimeError(f"case {name!r} failed") from error


if __name__ == "__main__":
    main()

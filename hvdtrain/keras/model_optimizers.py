"""Find every optimizer that a model's own train_step may use: a GAN has two, as attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras

from hvdtrain.adapter import Options


def other_optimizers(model: keras.Model) -> dict[str, Any]:
    """Return the optimizers besides the one of Keras's compile(), by attribute ("d_optimizer", "optimizers.d")."""
    own = getattr(model, "optimizer", None)  # there is none before compile()
    return {name: each for name, each, _ in _places(model) if each is not own}


def all_optimizers(model: keras.Model) -> list[Any]:
    """Return the model's optimizers, each once; that of compile() comes last."""
    return [*{id(each): each for each in other_optimizers(model).values()}.values(), model.optimizer]


def replace_optimizers(model: keras.Model, replace: Callable[[Any], Any], *, own: Any) -> None:
    """Put `replace(optimizer)` in the place of each other optimizer, and `own` where compile()'s has another name."""
    replaced: dict[int, Any] = {id(getattr(model, "optimizer", None)): own}
    for _, optimizer, put in list(_places(model)):
        if id(optimizer) not in replaced:
            replaced[id(optimizer)] = replace(optimizer)
        put(replaced[id(optimizer)])


def check_optimizers(model: keras.Model, options: Options) -> None:
    """Raise ValueError where steps of several optimizers would be wrong, or could not be resumed."""
    others = other_optimizers(model)
    if not others:
        return
    names = ", ".join(others)
    if keras.backend.backend() == "jax":
        raise ValueError(
            "On JAX, Keras passes the state of one optimizer through a train_step, that of compile(); others would not "
            f"change. Use KERAS_BACKEND=torch or tensorflow. Received: a {type(model).__name__} with {names}"
        )
    refused = {"accumulate": options.accumulate > 1, "nan_policy": options.nan_policy is not None}
    for name, given in {**refused, 'precision="fp16"': options.precision == "fp16"}.items():
        if given:
            raise ValueError(f"{name} needs a model with one optimizer. Received: {name} and {names}")
    for name, optimizer in others.items():
        if not optimizer.built:
            raise ValueError(
                f"{name} has no variables yet. Ranks compare them, and a checkpoint restores them, before the first "
                f"step. In compile(), add self.{name}.build(...) with the variables that it trains. Received: an "
                f"unbuilt {type(optimizer).__name__}"
            )


def _places(model: keras.Model) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Yield each optimizer among the model's attributes, also in lists, tuples and dicts: its name and what sets it."""
    for name, value in list(vars(model).items()):
        if name in ("optimizer", "_compile_config", "_tracker") or name.startswith("_self_"):
            continue
        if isinstance(value, keras.optimizers.Optimizer):
            yield name, value, lambda new, name=name: setattr(model, name, new)  # type: ignore[misc]
        elif isinstance(value, dict | list):
            for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if isinstance(each, keras.optimizers.Optimizer):
                    yield f"{name}.{key}", each, lambda new, value=value, key=key: value.__setitem__(key, new)  # type: ignore[misc]
        elif isinstance(value, tuple) and any(isinstance(each, keras.optimizers.Optimizer) for each in value):
            raise ValueError(f"Keep optimizers in a list, which can be changed. Received: a tuple, {name}")

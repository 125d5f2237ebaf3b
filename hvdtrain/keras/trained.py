"""Save and restore which weights of a Keras model are trained: callbacks freeze and unfreeze layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.variables import path


def flags_of(model: keras.Model) -> list[bool]:
    """Return for each layer, and then for each weight, whether it is trainable."""
    return [bool(each.trainable) for each in _switches(model)]


def set_flags(model: keras.Model, new: Sequence[bool]) -> list[str]:
    """Set what `flags_of` returned; return the names of the layers and weights that change.

    Flags of another model change nothing. A compiled step is compiled again if anything changes.
    """
    switches = _switches(model)
    if len(new) != len(switches):
        return []
    changed = []
    for switch, flag in zip(switches, new, strict=True):
        if bool(switch.trainable) != flag:
            changed.append(str(switch.name))
            if isinstance(switch, keras.layers.Layer):
                switch._trainable = flag  # of this layer alone: `trainable` would set those below it, too
            else:
                switch.trainable = flag
    if changed:
        model.train_function = None
    return changed


def _switches(model: keras.Model) -> list[Any]:
    return [*model._flatten_layers(), *model.weights]


def optimizer_fits(model: keras.Model) -> bool:
    """Return whether the optimizer of `model` can train the weights that are trained now."""
    now, known = ({id(v) for v in each} for each in (model.trainable_variables, _own(model)._trainable_variables))
    return now == known if keras.backend.backend() == "jax" else now <= known


def _own(model: keras.Model) -> Any:
    return distributed_part(model.optimizer) or model.optimizer


def build_again(model: keras.Model) -> None:
    """Build the optimizer of `model` over the weights that are trained now, as a callback does that unfreezes layers.

    New variables, such as momenta, are zero. The earlier variables stay, unused, in front of them.
    """
    optimizer = _own(model)
    optimizer.built = False
    optimizer._trainable_variables_indices = {}  # else JAX's step counts those of before, too
    optimizer.build(model.trainable_variables)
    model.train_function = None


def follow(model: keras.Model) -> str:
    """Let the next step train the weights that are trainable now; return what was done to the optimizer, or "".

    Keras's compiled step trains those of before, without a word, and its optimizer has no state for others. Here the
    optimizer is built again for them, and weights that it has trained keep their state.
    """
    model.train_function = None
    optimizer = _own(model)
    if not optimizer.built or optimizer_fits(model):
        return ""
    before, held = list(optimizer._trainable_variables), list(optimizer.variables)
    build_again(model)
    weights = {id(v): v for v in [*before, *model.trainable_variables]}.values()
    if len({path(v) for v in weights}) < len(weights):  # equal names do not say which state is whose
        return "the optimizer was built again for the weights that are trained now, and its state is new"
    kept = {path(v): v for v in held}
    for variable in optimizer.variables[len(held) :]:
        if path(variable) in kept:
            # A copy: on JAX, the step gives up the memory of both.
            variable.assign(keras.ops.copy(keras.ops.convert_to_tensor(kept[path(variable)])))
    return "the optimizer was built again for the weights that are trained now; those it has trained keep their state"


def latest(
    current: Iterable[str], saved: Iterable[str], built: Iterable[str], plain: Callable[[str], str]
) -> dict[str, str] | None:
    """Return which saved variable belongs to which of an optimizer that was built again, by name; None if not known.

    Both may have unused variables, and not equally many: the last of each `plain` name belong together.

    Args:
        current: names of the optimizer's variables.
        saved: names of the checkpoint's.
        built: those of `current` that the last build has made.
        plain: returns a name without its number, which is equal for a weight's variables of each build.
    """
    here, there = _by_name(current, plain), _by_name(saved, plain)
    needed = Counter(map(plain, built))
    if here.keys() != there.keys() or any(len(there[n]) < needed.get(n, len(here[n])) for n in here):
        return None
    pairs = (zip(reversed(here[name]), reversed(there[name]), strict=False) for name in here)
    return {mine: theirs for of_name in pairs for mine, theirs in of_name}


def _by_name(names: Iterable[str], plain: Callable[[str], str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):  # by number, which a file does not keep in order
        found[plain(name)].append(name)
    return found

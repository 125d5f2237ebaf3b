"""Activation checkpointing: chosen layers do not save their inner tensors, and are computed again in backward.

`keras.remat` computes a function again. A layer's `call` is no function of its inputs alone: it draws from seed
generators, changes running statistics, and asks which layer has called it. Here all of that is the same both times.
(`keras.RematScope` does not see to it: with Dropout, its second computation draws other masks than the first.)
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import keras
from keras.src import backend
from keras.src.backend.common import global_state

from hvdtrain.adapter import counted_by_class
from hvdtrain.keras.backends import backend_module

Rule = bool | str | Callable[[Any], Any]

_WAY_OUT = "Choose layers by a function: checkpoint_activations=lambda layer: isinstance(layer, Block)"
_CALLER = "current_call_ctx"  # Keras's name of what layers learn from those that call them, such as `training`


class ActivationCheckpoints:
    """Within the block, each call of a chosen layer saves the call's inputs only. Layers change within the block alone.

    TensorFlow and JAX call layers only when they trace a step: what is traced in the block stays so.

    Args:
        chosen: the layers.
        compiling: returns the block in which steps are compiled; see `hvdtrain.keras.backends`.
        warning: why it saves no memory here; "" if it does.
    """

    def __init__(
        self, chosen: Sequence[Any], compiling: Callable[[], AbstractContextManager[Any]], warning: str
    ) -> None:
        self._chosen, self._compiling, self.warning = list(chosen), compiling, warning
        self._within = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as within:
            within.enter_context(self._compiling())
            for layer in self._chosen:
                vars(layer)["call"] = _Call(layer)  # not by setattr, for which Keras has rules
                within.callback(vars(layer).pop, "call")
            self._within = within.pop_all()

    def __exit__(self, *error: object) -> None:
        self._within.close()

    def __str__(self) -> str:
        chosen = {layer.name: layer for layer in self._chosen}
        return f"activations that backward computes again: {counted_by_class(chosen)}"


class _Call:
    """The call method of a chosen layer."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._call = layer, layer.call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._layer.built:  # Keras looks for shapes
            return self._call(*args, **kwargs)
        leaves = keras.tree.flatten((args, kwargs))
        floats = [index for index, leaf in enumerate(leaves) if _is_float(leaf)]
        once = _Once(self._layer, [leaf for leaf in leaves if backend.is_tensor(leaf)])

        def compute(*tensors: Any) -> Any:
            mine = list(leaves)
            for index, tensor in zip(floats, tensors, strict=True):
                mine[index] = tensor
            with once.again(inputs=[leaf for leaf in mine if backend.is_tensor(leaf)]):
                own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), mine)
                return once.results(self._call(*own_args, **own_kwargs))

        with _whole():
            return once.outputs(keras.remat(compute)(*(leaves[index] for index in floats)))


def _whole() -> AbstractContextManager[Any]:
    """Let torch compute a layer to its end, when it does so again.

    By default torch raises an exception in it as soon as it has what it needs. Keras puts the call's arguments into
    exceptions, which then hold the layer's tensors until Python collects garbage.
    """
    if keras.backend.backend() != "torch":
        return nullcontext()
    return importlib.import_module("torch.utils.checkpoint").set_checkpoint_early_stop(False)  # type: ignore[no-any-return]


class _Once:
    """What a layer's call reads besides its inputs, as it is now, for the first and the second computation."""

    def __init__(self, layer: Any, inputs: list[Any]) -> None:
        self._layer, self._inputs = layer, inputs
        self._masks = [backend.get_keras_mask(tensor) for tensor in inputs]
        self._masks_after = self._masks  # attention takes the mask off its inputs
        self._variables = _changing(layer)
        self._values = [keras.ops.copy(variable.value) for variable in self._variables]
        outer = backend.get_stateless_scope() if backend.in_stateless_scope() else None
        self._known = {} if outer is None else dict(outer.state_mapping)
        self._caller = global_state.get_global_attribute(_CALLER)
        self._autocast = backend.get_autocast_scope()
        self._structure: Any = None  # of the outputs, with numbers in place of the tensors
        self._updates: list[Any] = []
        self._masks_of_outputs: list[Any] = []

    @contextmanager
    def again(self, inputs: list[Any]) -> Iterator[None]:
        """Restore it within the block, and give `inputs` the masks of the call's."""
        for tensor, mask in zip(inputs, self._masks, strict=True):
            backend.set_keras_mask(tensor, mask)
        before = global_state.get_global_attribute(_CALLER)
        self._scope = _Scope(collect_losses=True, initialize_variables=False)
        self._scope.state_mapping = dict(self._known)
        for variable, value in zip(self._variables, self._values, strict=True):
            self._scope.state_mapping[id(variable)] = value
        autocast = nullcontext() if self._autocast is None else backend.AutocastScope(self._autocast.dtype)
        global_state.set_global_attribute(_CALLER, self._caller)
        try:
            with self._scope, autocast:
                yield
            self._masks_after = [backend.get_keras_mask(tensor) for tensor in inputs]
        finally:
            global_state.set_global_attribute(_CALLER, before)

    def results(self, outputs: Any) -> Any:
        """Return tensors that backward can differentiate; on JAX, which traces a function, with the changed state."""
        self._check()
        leaves = keras.tree.flatten(outputs)
        tensors = [leaf for leaf in leaves if _is_traced(leaf)]
        updates = [self._scope.get_current_value(variable) for variable in self._variables]
        if self._structure is None:  # the first time
            numbers = iter(range(len(tensors)))
            self._structure = keras.tree.pack_sequence_as(
                outputs, [_Tensor(next(numbers)) if _is_traced(leaf) else leaf for leaf in leaves]
            )
            self._masks_of_outputs = [self._mask(tensor) for tensor in tensors]
            self._updates = updates
        return (tensors, updates) if keras.backend.backend() == "jax" else tuple(tensors)

    def outputs(self, results: Any) -> Any:
        """Return what the layer has returned, and change its variables, once."""
        tensors, updates = results if keras.backend.backend() == "jax" else (results, self._updates)
        for variable, value in zip(self._variables, updates, strict=True):
            variable.assign(value)
        masks = zip([*self._inputs, *tensors], [*self._masks_after, *self._masks_of_outputs], strict=True)
        for tensor, mask in masks:
            backend.set_keras_mask(tensor, mask)
        return keras.tree.map_structure(
            lambda leaf: tensors[leaf.number] if isinstance(leaf, _Tensor) else leaf, self._structure
        )

    def _mask(self, output: Any) -> Any:
        mask = backend.get_keras_mask(output)
        if mask is not None and not any(mask is each for each in self._masks):
            raise ValueError(self._refusal("returns a mask that it has computed"))
        return mask

    def _check(self) -> None:
        if self._scope.losses:
            raise ValueError(self._refusal("adds a loss (add_loss, or activity_regularizer of a layer in it)"))
        known = {id(variable) for variable in self._variables}
        foreign = [variable for variable in self._scope.changed if id(variable) not in known]
        if foreign:
            raise ValueError(self._refusal(f"changes {foreign[0].path}, which is no variable of its own"))

    def _refusal(self, problem: str) -> str:
        return (
            f"checkpoint_activations computes a layer twice, and {type(self._layer).__name__} {self._layer.name} "
            f"{problem}. Leave this layer out. {_WAY_OUT}."
        )


class _Tensor:
    """Stands for a tensor in a structure of outputs."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Scope(keras.StatelessScope):
    """A scope that knows which variables are changed in it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.changed: list[Any] = []

    def add_update(self, update: Any) -> None:
        self.changed.append(update[0])
        super().add_update(update)


def _changing(layer: Any) -> list[Any]:
    """Return the variables that a call may change: no weights, but running statistics and states of generators."""
    found: dict[int, Any] = {}
    for each in layer._flatten_layers():
        states = [generator.state for generator in each._seed_generators]
        found |= {id(variable): variable for variable in [*each._non_trainable_variables, *states]}
    found |= {id(variable): variable for variable in layer.metrics_variables}
    everyones = global_state.get_global_attribute("global_seed_generator")  # of layers and functions without a seed
    if everyones is not None:
        found[id(everyones.state)] = everyones.state
    return list(found.values())


def _is_traced(leaf: Any) -> bool:
    """Return whether an output of the first computation must pass through `remat`."""
    return bool(backend.is_tensor(leaf)) and (keras.backend.backend() == "jax" or _is_float(leaf))


def _is_float(leaf: Any) -> bool:
    return backend.is_tensor(leaf) and "float" in backend.standardize_dtype(leaf.dtype)


def choose(model: Any, rule: Rule) -> ActivationCheckpoints:
    """Return the layers that a rule chooses, ready to be checkpointed.

    True and "blocks" choose only layers that consist of others; of nested ones the outer, but instead of a model that
    contains such layers these.

    Args:
        model: a Keras model.
        rule: "blocks": layers beside another one of their class. True: also all other layers of a Sequential or
            functional model. Or a function (layer) -> bool, which is asked of each layer inside the model, but not of
            layers inside a chosen one.

    Raises:
        ValueError: the rule chooses nothing, or a layer that cannot be computed again.
    """
    found = _asked(model, rule) if callable(rule) else _blocks(model, every=rule is True)
    received = f"checkpoint_activations={getattr(rule, '__qualname__', repr(rule))}, for {model.name}"
    if not found:
        looked_for = "is True for no layer" if callable(rule) else "found no layer that consists of others"
        raise ValueError(f"The rule {looked_for}. Received: {received}. {_WAY_OUT}.")
    inside = [id(each) for layer in found for each in layer._flatten_layers(include_self=False)]
    chosen = {id(layer): layer for layer in found if id(layer) not in inside}
    for layer in chosen.values():
        for each in layer._flatten_layers():
            _check(layer, each, received)
    return ActivationCheckpoints(list(chosen.values()), *backend_module().compiling_again(model))


def _asked(parent: Any, rule: Callable[[Any], Any]) -> list[Any]:
    children = [child for child in parent._layers if not isinstance(child, keras.layers.InputLayer)]
    return [each for child in children for each in ([child] if rule(child) else _asked(child, rule))]


def _blocks(parent: Any, *, every: bool) -> list[Any]:
    found: list[Any] = []
    counts = Counter(map(type, parent._layers))
    every_child = every and isinstance(parent, keras.Sequential | keras.src.models.functional.Functional)
    for child in parent._layers:
        inner = _blocks(child, every=every)
        is_block = bool(child._layers) and (every_child or counts[type(child)] > 1)
        found += inner if not is_block or (inner and isinstance(child, keras.Model)) else [child]
    return found


def _check(layer: Any, part: Any, received: str) -> None:
    """Raise ValueError if `part` of a chosen layer cannot be computed again, or would be a third time."""
    if type(part).__module__.startswith("hvdtrain."):
        raise ValueError(
            f"{part.name} exchanges statistics with other ranks in each call. Received: {received}, which chooses "
            f"{layer.name}. Leave this layer out, or use BatchNormalization. {_WAY_OUT}."
        )
    if getattr(part, "_remat_mode", None) is not None:
        raise ValueError(
            "A layer that was made in keras.RematScope is computed again by Keras, which draws other random numbers "
            f"than at first. Make the model without the scope. Received: {received}, and {part.name}."
        )

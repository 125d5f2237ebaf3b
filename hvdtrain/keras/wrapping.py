"""Make the user's optimizer, or a compiled or saved model's, distributed; Keras still saves it as the user's class."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any

import keras

from hvdtrain.distributed.world import refuse_grid
from hvdtrain.keras import basics
from hvdtrain.keras.memory import measure_script
from hvdtrain.keras.optimizer import DistributedMixin, distributed_part
from hvdtrain.keras.reduction import Compression, GradientReduction, reduction_of
from hvdtrain.keras.shards import check as check_sharded
from hvdtrain.keras.shards import shards_of

log = logging.getLogger("hvdtrain")


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = basics.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: Any | None = None,
    scale_local_gradients: bool = True,
    shard_state: bool = False,
) -> Any:
    """Return an optimizer of the user's class whose gradients are reduced over ranks before they are applied.

    It holds the same variables and state as `optimizer`, which does not change itself. Saved models name the user's
    class. They load in plain Keras, with the optimizer's state.

    Args:
        optimizer: a Keras 3 optimizer, a name such as "adam", or a LossScaleOptimizer, whose inner one is wrapped.
        name: prefix of the names of reductions; equal on all ranks.
        device_dense: TensorFlow device of the reductions; TensorFlow backend only.
        device_sparse: likewise, for tf.IndexedSlices.
        compression: the form in which gradients are sent: Compression.none, .fp16, .bf16, .int8, .topk(fraction) or
            .powersgd(rank), or a name or an object of these as for the Trainer.
        sparse_as_dense: reduce tf.IndexedSlices as dense tensors instead of gathering their rows.
        gradient_predivide_factor: divide before the sum and multiply after it; with op=Average only.
        op: Average or Sum.
        backward_passes_per_step: steps whose gradients are added up before they are reduced and applied. It multiplies
            the optimizer's gradient_accumulation_steps.
        average_aggregated_gradients: divide that sum by backward_passes_per_step.
        num_groups: Horovod's older name of `groups`, for a number.
        groups: number of groups, or lists of variables; each group is reduced in one operation.
        process_set: ranks that take part; None for all.
        scale_local_gradients: divide the gradients of variables registered as local by the number of ranks.
        shard_state: each rank holds and updates 1/N of the optimizer's slot variables; weights are gathered after each
            step. On every rank, call `consolidate_state_dict()` before the model is saved. For Keras's SGD, Adam,
            AdamW and others whose update of a number depends on that number alone.
    """
    # On its torch backend Keras would also take torch.distributed for a reason to average by DistributedDataParallel.
    refuse_grid("Keras's DistributedOptimizer", "Train a Keras model in a job without a Grid")
    optimizer = _plain(optimizer)
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be >= 1. Received: {backward_passes_per_step}")
    if shard_state:
        check_sharded(optimizer)
    how = reduction_of(
        op=op,
        compression=compression,
        factor=1.0 if average_aggregated_gradients else float(backward_passes_per_step),
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
        num_groups=num_groups,
        process_set=process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
        scale_local_gradients=scale_local_gradients,
        name=name or "",
        shard_state=shard_state,
    )
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    inner = optimizer.inner_optimizer if is_scaled else optimizer
    distributed = _twin(inner, _distributed_class(type(inner), how))
    _divide(distributed)
    if backward_passes_per_step > 1:
        _accumulate(distributed, backward_passes_per_step)
    measure_script(optimizer=distributed)
    if inner is optimizer:
        return distributed
    outer = _twin(optimizer, type(optimizer))
    outer.inner_optimizer = distributed
    return outer


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = basics.Average,
    groups: int | list[list[Any]] | None = None,
    process_set: Any | None = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedOptimizer` that does not reduce the gradients of `local_layers`: a Keras layer or several.

    Each rank trains the variables of these layers on its own. The other arguments are those of `DistributedOptimizer`.
    """
    local = weights_of(local_layers)
    how = (name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op)
    distributed = DistributedOptimizer(
        optimizer, *how, groups=groups, process_set=process_set, scale_local_gradients=scale_local_gradients
    )
    part: Any = distributed_part(distributed)
    for variable in local:
        part.register_local_var(variable)
    return distributed


def weights_of(local_layers: Any) -> list[Any]:
    """Return the trainable weights of a Keras layer, or of several; None means no layer."""
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or [])
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise ValueError(f"local_layers must be keras layers. Received: {local_layers!r}")
    return [v for layer in layers for v in layer.trainable_weights]


def load_model(
    filepath: Any,
    custom_optimizers: list[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved model whose optimizer, with its state, is distributed.

    Args:
        filepath: a .keras or .h5 file, as keras.models.load_model takes it.
        custom_optimizers: optimizer classes of your own that the file names.
        custom_objects: further objects that the file names.
        compression: the form in which gradients are sent, as for `DistributedOptimizer`.
        legacy_opts: must be False, or ValueError: Keras 3 has no legacy optimizers.
    """
    if legacy_opts:
        raise ValueError("Keras 3 has no legacy optimizers. Received: legacy_opts=True")
    objects = {**{cls.__name__: cls for cls in custom_optimizers or []}, **(custom_objects or {})}
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        _mend_optimizer(model, filepath)
        distribute_model(model, compression=compression)
    return model


def distribute_model(model: Any, **options: Any) -> None:
    """Make the optimizer of a compiled model distributed, keeping its state; options as for `DistributedOptimizer`."""
    adopt_optimizer(model, DistributedOptimizer(model.optimizer, **options))


def adopt_optimizer(model: Any, distributed: Any) -> None:
    """Give a compiled model a distributed optimizer, for training and for saving."""
    model.optimizer = distributed
    compiled = model._compile_config.config  # what the next save writes
    wrapped = isinstance(compiled.get("optimizer"), keras.optimizers.LossScaleOptimizer)
    compiled["optimizer"] = model.optimizer if wrapped else distributed_part(model.optimizer)
    model.train_function = None  # it may hold the plain optimizer
    without_xla(model)
    measure_script(model=model)


def _mend_optimizer(model: Any, filepath: Any) -> None:
    """Give a model from an HDF5 file an optimizer that can continue: Keras 3.15 builds it over no variables at all."""
    optimizer = model.optimizer
    if not optimizer.built or optimizer._trainable_variables or not model.trainable_variables:
        return
    import h5py
    from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group

    model.optimizer = type(optimizer).from_config(optimizer.get_config())
    model.optimizer.build(model.trainable_variables)
    with contextlib.nullcontext(filepath) if hasattr(filepath, "attrs") else h5py.File(filepath) as file:
        values = load_optimizer_weights_from_hdf5_group(file)  # read from the file when they are assigned
        if len(values) != len(model.optimizer.variables):
            raise ValueError(
                f"{filepath} holds {len(values)} values of its optimizer's state, but {type(optimizer).__name__} has "
                f"{len(model.optimizer.variables)}. Save the model as .keras instead."
            )
        model.optimizer.set_weights(values)


def _plain(optimizer: Any) -> Any:
    """Return `optimizer`, or the optimizer of this name, if it can be distributed."""
    optimizer = keras.optimizers.get(optimizer) if isinstance(optimizer, str | dict) else optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"Give a Keras 3 optimizer; for torch.optim's use hvdtrain.torch. Received: {optimizer!r}")
    if distributed_part(optimizer) is not None:
        raise ValueError(f"{type(optimizer).__name__} is already distributed: its gradients would be reduced twice.")
    return optimizer


def _distributed_class(base: type, how: GradientReduction) -> type:
    """Return a subclass of `base` that reduces gradients, and that Keras serialises as `base`."""
    from keras.src import api_export
    from keras.src.saving import object_registration

    namespace = {"_hvd_how": how, "__module__": base.__module__, "__doc__": base.__doc__}
    cls = type(base.__name__, (DistributedMixin, base), namespace)
    cls.__qualname__ = base.__qualname__
    # Keras writes this name to files, and plain Keras finds the user's class by it.
    for names in (api_export.REGISTERED_OBJS_TO_NAMES, object_registration.GLOBAL_CUSTOM_NAMES):
        if base in names:
            names[cls] = names[base]
    return cls


def _twin(optimizer: Any, cls: type) -> Any:
    """Return an optimizer of class `cls` with the variables and settings of `optimizer`, and copies of its lists.

    It is not made from the config, which would lose built state, learning rates that are functions, and variables
    excluded from weight decay.
    """
    twin: Any = object.__new__(cls)
    twin._lock = False
    for key, value in vars(optimizer).items():
        # TensorFlow makes its tracking attributes ("_self_...") again when the others are set.
        if key in ("_tracker", "_variables", "_lock", "_hvdtrain_state") or key.startswith("_self_"):
            continue
        # Containers are copied, so that building one optimizer does not build the other.
        kind = next((kind for kind in (list, dict, set) if isinstance(value, kind)), None)
        setattr(twin, key, kind(value) if kind else value)
    _track(twin, list(optimizer._variables))
    return twin


def _track(optimizer: Any, variables: list[Any]) -> None:
    """Make `variables` the ones that Keras saves and loads for `optimizer`, in this order."""
    from keras.src import backend
    from keras.src.utils.tracking import Tracker

    # As in an optimizer's __init__: first the list, so that it is not tracked itself, then the tracker.
    vars(optimizer).pop("_tracker", None)
    optimizer._variables = variables
    store = optimizer._variables  # TensorFlow's __setattr__ has wrapped it
    tracker = Tracker({"variables": (lambda x: isinstance(x, backend.Variable), store)})
    tracker.stored_ids["variables"].update(id(v) for v in variables)
    optimizer._tracker = tracker


def _divide(optimizer: Any) -> None:
    """Give a built optimizer whose state is sharded new slot variables, with this rank's part of the values."""
    if optimizer._hvd_shards is None or not optimizer.built:
        return
    values, weights = list(optimizer._variables), list(optimizer._trainable_variables)
    _track(optimizer, values[: 1 + isinstance(optimizer._learning_rate, keras.Variable)])
    optimizer.built = False
    optimizer.build(weights)
    for variable, value in zip(optimizer._variables, values, strict=True):
        if variable is not value:
            variable.assign(keras.ops.convert_to_numpy(value))


def _accumulate(optimizer: Any, passes: int) -> None:
    """Multiply the accumulation steps by `passes`, and give a built optimizer its accumulators."""
    had = optimizer.gradient_accumulation_steps
    optimizer.gradient_accumulation_steps = (had or 1) * passes
    if not optimizer.built or had:
        return
    known = len(optimizer._variables)
    optimizer._accumulated_gradients = [
        optimizer.add_variable_from_reference(v, name="gradient_accumulator") for v in optimizer._trainable_variables
    ]
    # Files store an optimizer's variables by number. Keras makes accumulators directly after the base variables.
    variables = list(optimizer._variables)
    averages = getattr(optimizer, "_model_variables_moving_average", None) or []
    base = 1 + isinstance(optimizer._learning_rate, keras.Variable) + sum(a is not None for a in averages)
    _track(optimizer, variables[:base] + variables[known:] + variables[base:known])


def _patch_keras() -> None:
    """Patch what an optimizer cannot change from inside; nothing changes where no optimizer is distributed."""
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.trainers.trainer import Trainer

    scaling: Any = keras.optimizers.LossScaleOptimizer
    original_check, original_compile = scaling.check_finite, Trainer.compile

    @functools.wraps(original_check)
    def check_finite(self: Any, grads: Any) -> Any:
        finite, part = original_check(self, grads), distributed_part(self)
        # Ranks must agree to skip: a rank that skips sends nothing, and the others would wait for it.
        return finite if part is None else part.finite_everywhere(finite, grads)

    @functools.wraps(original_compile)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        # Horovod's documentation has this argument; Keras 3 no longer has it and does not need it.
        kwargs.pop("experimental_run_tf_function", None)
        original_compile(self, *args, **kwargs)
        without_xla(self)
        if distributed_part(self.optimizer) is not None:
            measure_script(model=self)

    original_save = legacy_h5_format.save_model_to_hdf5

    @functools.wraps(original_save)
    def save_model(model: Any, filepath: Any, overwrite: bool = True, include_optimizer: bool = True) -> None:
        # Before the file is opened: Keras's writer does not restore its settings after an error.
        if include_optimizer and shards_of(getattr(getattr(model, "optimizer", None), "variables", ())):
            raise RuntimeError(
                "The optimizer's state is in shards: each rank holds a part, which an HDF5 file would take for the "
                "whole. On every rank, call consolidate_state_dict(), then save the model as .keras. "
                f"Received: {filepath}"
            )
        original_save(model, filepath, overwrite, include_optimizer)

    scaling.check_finite, Trainer.compile = check_finite, compile
    legacy_h5_format.save_model_to_hdf5 = save_model


def without_xla(model: Any) -> None:
    """Turn XLA (TensorFlow) or torch.compile (torch) off for a model whose optimizer is distributed, and log it."""
    if keras.backend.backend() == "jax" or not getattr(model, "jit_compile", False):
        return
    if distributed_part(model.optimizer) is not None:
        model.jit_compile = False
        log.info("jit_compile True -> False: Horovod's operations do not compile with the step of %s", model.name)


# Here, since `model.compile(hvd.DistributedOptimizer(...))` looks `compile` up before it makes the optimizer.
_patch_keras()

"""Activation checkpointing: chosen modules do not save their inner tensors, and are computed again in backward.

torch's `checkpoint` computes them again. Here are the rules that choose modules, and what torch leaves to its users:
running statistics, train and eval modes, and the random numbers of Python and NumPy.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from hvdtrain.adapter import counted_by_class
from hvdtrain.distributed import agreement, launch_environment
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops import divided, names

Rule = bool | str | Callable[[Any], Any]

# Attributes by which models of transformers and timm say that they checkpoint themselves.
_OWN = ("gradient_checkpointing", "grad_checkpointing")
_LISTS = (nn.ModuleList, nn.ModuleDict)
_WAY_OUT = "Choose modules by a function: checkpoint_activations=lambda module: isinstance(module, Block)"


class ActivationCheckpoints:
    """Within the block, each call of a chosen module saves the call's inputs only, if gradients are enabled.

    The modules change within the block alone: pickling, copies and evaluation have them as the user made them. The
    backward pass may come after the block. The block may be entered many times.

    Args:
        chosen: the modules by name, as `choose` returns them.
    """

    def __init__(self, chosen: Mapping[str, nn.Module]) -> None:
        self._chosen = dict(chosen)
        self._depth = 0
        self._before: list[dict[str, Any]] = []  # what the modules' own attributes had as `forward`

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for name, module in self._chosen.items():
            held = module.__dict__
            self._before.append({"forward": held["forward"]} if "forward" in held else {})
            held["forward"] = _Forward(name, module)  # not by setattr, for which a module may have rules

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for module, before in zip(self._chosen.values(), self._before, strict=True):
            del module.__dict__["forward"]
            module.__dict__.update(before)
        self._before.clear()

    def __str__(self) -> str:
        return f"activations that backward computes again: {counted_by_class(self._chosen)}"


class _Forward:
    """The forward method of a chosen module."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module, self._forward = name, module, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # By position, so that torch sees if an input is overwritten before it is used again.
        call = _Call(self._name, self._module, self._forward, list(kwargs))
        return checkpoint(call, *args, *kwargs.values(), use_reentrant=False)


class _Call:
    """One call of a chosen module; when it is called again, everything is as it was at first."""

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any], keywords: list[str]) -> None:
        self._name, self._forward, self._keywords = name, forward, keywords
        self._modes = {each: each.training for each in module.modules()}
        self._random = _random_states()
        self._is_again = False

    def __call__(self, *values: Any) -> Any:
        positional = len(values) - len(self._keywords)
        args, kwargs = values[:positional], dict(zip(self._keywords, values[positional:], strict=True))
        if self._is_again:
            with self._as_at_first():
                return self._forward(*args, **kwargs)
        self._is_again = True
        with self._unchanged_buffers():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _unchanged_buffers(self) -> Iterator[None]:
        """Raise ValueError if the block changes a buffer that the same computation would then read changed."""
        before = [
            (module, name, buffer, buffer._version)
            for module in self._modes
            if not isinstance(module, _NormBase)
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]
        yield
        for module, name, buffer, version in before:
            if module._buffers.get(name) is not buffer or buffer._version != version:
                raise ValueError(
                    f"checkpoint_activations computes a module twice, and forward of {self._name or 'the model'} "
                    f"changes a buffer: {name} of a {type(module).__name__}. The second time, it would compute "
                    f"something else. Leave this module out. {_WAY_OUT}."
                )

    @contextmanager
    def _as_at_first(self) -> Iterator[None]:
        """Restore modes and random states of the first call, and let nothing that the block changes remain."""
        modes, states = {module: module.training for module in self._modes}, _random_states()
        _set_modes(self._modes)
        # In train mode, outputs do not depend on running statistics: it is enough that they count a batch once.
        norms = [each for each in self._modes if isinstance(each, _NormBase) and each.training]
        buffers = [dict(norm._buffers) for norm in norms]
        for norm in norms:
            norm._buffers.update({name: held.clone() for name, held in norm._buffers.items() if held is not None})
        _set_random_states(self._random)
        try:
            yield
        finally:  # torch raises within the block as soon as it has what it needs
            for norm, held in zip(norms, buffers, strict=True):
                norm._buffers.update(held)
            _set_modes(modes)
            _set_random_states(states)


def _set_modes(modes: Mapping[nn.Module, bool]) -> None:
    for module, mode in modes.items():
        if module.training != mode:
            module.training = mode  # of this module alone, which `train` would not be


def _random_states() -> tuple[Any, Any]:
    # torch restores its own. NumPy's global one, which users draw from.
    return random.getstate(), np.random.get_state()  # noqa: NPY002


def _set_random_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002


def choose(models: Mapping[str, nn.Module], rule: Rule, world: World) -> ActivationCheckpoints:
    """Return the modules that a rule chooses, ready to be checkpointed; except in an elastic job, a collective.

    True and "blocks" choose only modules that consist of others; of nested ones the outer, but instead of a Sequential
    of such modules its members.

    Args:
        models: models by name; the name of a single one is "".
        world: the ranks, which must choose the same.
        rule: "blocks": the members of each ModuleList and ModuleDict, and modules that stand in a Sequential beside
            another one of their class. If there are none, modules that are attributes of one module and have the same
            class. True: "blocks", and all other members of a Sequential. Or a function (module) -> bool, which is asked
            of each module inside the models, but not of modules inside a chosen one.

    Raises:
        ValueError: the rule chooses nothing, or a module that cannot be computed again.
        DesyncError: ranks choose different modules.
    """
    chosen: dict[str, nn.Module] = {}
    for name, model in models.items():
        prefix = f"{name}." if name else ""
        if callable(rule):
            chosen |= _asked(model, prefix, rule)
        else:
            chosen |= _members(model, prefix, every=rule is True) or _siblings(model, prefix)
    kinds = ", ".join(type(model).__name__ for model in models.values())
    received = f"checkpoint_activations={getattr(rule, '__qualname__', repr(rule))}, for {kinds}"
    has_stages = world.grid is not None and world.grid.stages > 1
    if not (any(world.allgather_object(bool(chosen), name="checkpointed")) if has_stages else chosen):
        looked_for = "is True for no module" if callable(rule) else "found no module that consists of others"
        raise ValueError(f"The rule {looked_for}. Received: {received}. {_WAY_OUT}.")
    for model in models.values():
        _check(model, chosen, received)
    checkpoints = ActivationCheckpoints({names.plain(name): module for name, module in _topmost(chosen).items()})
    if not launch_environment.is_elastic() and not has_stages:  # whose new ranks make their Trainer alone
        what = {"what checkpoint_activations chooses": str(checkpoints)}
        agreement.require_equal(what, world=world, what="the model", advice="The rule must not depend on the rank.")
    return checkpoints


def _topmost(chosen: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules once each, without those inside another one: modules may be shared."""
    inner = {each for module in chosen.values() for each in module.modules() if each is not module}
    names_of: dict[nn.Module, str] = {}
    for name, module in chosen.items():
        names_of.setdefault(module, name)
    return {name: module for module, name in names_of.items() if module not in inner}


def _asked(parent: nn.Module, prefix: str, rule: Callable[[Any], Any]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, child in parent.named_children():
        found |= {f"{prefix}{name}": child} if rule(child) else _asked(child, f"{prefix}{name}.", rule)
    return found


def _kinds(parent: nn.Module) -> Counter[type] | None:
    """Return the numbers of the layers of a whole nn.Sequential by class, of which `parent` is a stage; else None."""
    return getattr(parent, "layer_kinds", None)


def _members(parent: nn.Module, prefix: str, *, every: bool) -> dict[str, nn.Module]:
    """Return the members of lists and, of the same class or `every` one, of sequences."""
    found: dict[str, nn.Module] = {}
    counts = Counter(map(divided.class_of, parent.children())) if (kinds := _kinds(parent)) is None else kinds
    for name, child in parent.named_children():
        inner = _members(child, f"{prefix}{name}.", every=every)
        is_chosen = every or counts[divided.class_of(child)] > 1
        is_repeated = (isinstance(parent, nn.Sequential) or kinds is not None) and is_chosen
        is_block = (isinstance(parent, _LISTS) or is_repeated) and _consists_of_others(child)
        found |= inner if not is_block or (inner and isinstance(child, nn.Sequential)) else {f"{prefix}{name}": child}
    return found


def _siblings(parent: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """Return modules that have a sibling of their class."""
    found: dict[str, nn.Module] = {}
    counts = Counter(map(divided.class_of, parent.children()))
    for name, child in parent.named_children():
        is_block = counts[divided.class_of(child)] > 1 and _consists_of_others(child)
        found |= {f"{prefix}{name}": child} if is_block else _siblings(child, f"{prefix}{name}.")
    return found


def _consists_of_others(module: nn.Module) -> bool:
    """Return whether a module with a forward of its own has children; a layer alone saves little but its input."""
    children = [name for name, _ in module.named_children() if name != "parametrizations"]
    return bool(children) and not isinstance(module, _LISTS)


def _check(model: nn.Module, chosen: Mapping[str, nn.Module], received: str) -> None:
    """Raise ValueError for what cannot be computed again, or would be a third time."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        listed = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            "checkpoint_activations needs a model on one device: torch restores the random state of the inputs' device "
            f"only. Received: {received}, spread over {listed}. Call torch.utils.checkpoint in the model's forward."
        )
    inside = {each for module in chosen.values() for each in module.modules()}
    for name, module in model.named_modules():
        is_compiled = "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        if is_compiled and not inside.isdisjoint(module.modules()):
            raise ValueError(
                "torch.compile decides by itself what backward computes again: set "
                "torch._functorch.config.activation_memory_budget, or do not compile. Received: "
                f"{received}, and {names.plain(name) or 'the model'}, which is compiled."
            )
        is_own = "_checkpoint_wrapped_module" in module._modules  # torch's CheckpointWrapper
        if is_own or any(getattr(module, each, False) is True for each in _OWN):
            raise ValueError(
                "The model checkpoints its activations by itself: switch that off, such as by "
                f"model.gradient_checkpointing_disable(), or leave checkpoint_activations out. Received: {received}, "
                f"and {names.plain(name) or 'the model'}, which does so."
            )

"""A torch scheduler as it was made: its settings, its optimizer's rates, and how many steps it is made for."""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from typing import Any

# What steps change, or what follows from the optimizer's rate: no part of what a scheduler is made with.
_CHANGES = frozenset({
    "base_lrs", "_last_lr", "last_epoch", "_step_count", "_get_lr_called_within_step", "_is_initial", "T_cur",
})  # fmt: skip
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr")
_MOMENTA = ("momentum", "betas", "max_momentum", "base_momentum")


class Beginning:
    """A scheduler as it was made.

    Attributes:
        made: what it was made with, besides the optimizer's rates, as numbers; equal for equal schedules.
        rates: each parameter group's rate that it computes from; of the checkpoint, once these are used.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._state = deepcopy(scheduler.state_dict())
        self._groups = [_settings(group) for group in _groups(scheduler)]
        self.rates = [without_tensors(group.get("initial_lr", group.get("lr"))) for group in self._groups]
        self.made: list[Any] = [_fixed(without_tensors(self._state)), _constants(scheduler)]

    def restore(self) -> None:
        """Give the scheduler and its optimizer's rates the values that they had."""
        self._scheduler.load_state_dict(deepcopy(self._state))
        for group, settings in zip(_groups(self._scheduler), self._groups, strict=True):
            for name, value in settings.items():
                if hasattr(value, "new_tensor"):
                    group[name].copy_(value)  # in place: a captured or compiled step reads this tensor
                else:
                    group[name] = value


def _groups(scheduler: Any) -> Any:
    return getattr(getattr(scheduler, "optimizer", None), "param_groups", ())


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    names = _RATES + (_MOMENTA if "max_momentum" in group else ())
    return {name: deepcopy(group[name]) for name in names if name in group}


def _fixed(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)({key: _fixed(each) for key, each in value.items() if key not in _CHANGES})
    return [_fixed(each) for each in value] if isinstance(value, list) else value


def _constants(scheduler: Any) -> list[Any]:
    """Return the numbers that functions of a LambdaLR use, here or within others: its state does not have them."""
    inner = [each for each in getattr(scheduler, "_schedulers", ()) if each is not scheduler]
    own = [_numbers(function) for function in getattr(scheduler, "lr_lambdas", ())]
    return own + [_constants(each) for each in inner]


def _numbers(function: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while hasattr(function, "func"):  # functools.partial
        found |= {str(index): value for index, value in enumerate(function.args)} | function.keywords
        function = function.func
    if inspect.isfunction(function):
        found |= {str(index): value for index, value in enumerate(function.__defaults__ or ())}
        found |= function.__kwdefaults__ or {}
        with suppress(ValueError):  # a variable that has no value yet
            used = inspect.getclosurevars(function)
            found |= {**used.globals, **used.nonlocals}
    return {name: value for name, value in sorted(found.items()) if type(value) in (int, float)}


def length(scheduler: Any) -> int | None:
    """Return the number of steps that a scheduler is made for; None if its class has none."""
    milestones, inner = getattr(scheduler, "_milestones", None), getattr(scheduler, "_schedulers", None)
    if milestones and inner:
        last = length(inner[-1])
        return None if last is None else int(milestones[-1]) + last
    if hasattr(scheduler, "total_iters") and hasattr(scheduler, "power"):  # PolynomialLR
        return int(scheduler.total_iters)
    found = getattr(scheduler, "total_steps", getattr(scheduler, "T_max", None))
    return None if found is None else int(found)


def without_tensors(value: Any) -> Any:
    """Return a scheduler's state with numbers for tensors: a rate may be one, and every rate computed from it."""
    if hasattr(value, "new_tensor"):
        return value.tolist()
    if type(value) is dict:
        return {key: without_tensors(each) for key, each in value.items()}
    return [without_tensors(each) for each in value] if type(value) is list else value


def with_tensors(value: Any, here: Any) -> Any:
    """Return a saved state with tensors where the scheduler's own state, `here`, has them."""
    if hasattr(here, "new_tensor"):
        return here.new_tensor(value)
    if type(value) is dict and type(here) is Counter:  # milestones; a checkpoint of 0.1.0 has strings
        return Counter({int(key): times for key, times in value.items()})
    if type(value) is dict and type(here) is dict:
        return {key: with_tensors(each, here.get(key)) for key, each in value.items()}
    if type(value) is list and type(here) is list and len(value) == len(here):
        return [with_tensors(*pair) for pair in zip(value, here, strict=True)]
    return value

"""Each module's train or eval mode, which is the user's choice, while the Trainer trains and evaluates in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hvdtrain.torch.ops import names

_NAMED = 3  # modules in a log line


class Modes:
    """Puts a model into eval mode to evaluate, and gives each module its own mode back.

    A module that the user has put into eval mode, such as a frozen backbone, stays so in each step. A model that is in
    eval mode as a whole, as pretrained ones are when they are loaded, is trained in train mode.
    """

    def __init__(self, model: nn.Module, note: Callable[[str], None]) -> None:
        self._model, self._note = model, note
        self._begun = False
        self._of_steps: dict[nn.Module, bool] = {}  # modes of the last steps, as far as known
        self._before: dict[nn.Module, bool] | None = None  # modes before an evaluation; None if there is none

    def start(self) -> None:
        """Let the next step begin a fit."""
        self._begun = False

    def train(self) -> None:
        """Give the modules the modes in which they are trained; fast if nothing has changed."""
        self.resume()
        if not self._begun:
            self._begin()
        elif not self._model.training:  # a callback has evaluated the model, and left it like that
            self._set(self._of_steps)

    def evaluate(self) -> None:
        """Put all modules into eval mode, until `resume` or `train`."""
        if self._before is None:
            self._before = self._present()
            if self._model.training:
                self._of_steps = self._before
            self._model.eval()
        elif self._model.training:
            self._model.eval()

    def resume(self) -> None:
        """Give the modules back the modes that they had before `evaluate`."""
        if self._before is not None:
            before, self._before = self._before, None
            self._set(before)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put all modules into eval mode within the block."""
        is_outermost = self._before is None
        self.evaluate()
        try:
            yield
        finally:
            if is_outermost:
                self.resume()

    @property
    def array(self) -> NDArray[np.uint8]:
        """For each module, whether it trains; during an evaluation, whether it did before."""
        held = self._present() if self._before is None else self._before
        return np.array([held.get(module, module.training) for module in self._model.modules()], np.uint8)

    @array.setter
    def array(self, flags: NDArray[np.uint8]) -> None:
        modules = list(self._model.modules())
        if len(flags) != len(modules):  # of another model, with the same tensors
            return
        self.resume()
        modes = dict(zip(modules, flags.astype(bool).tolist(), strict=True))
        changed = sum(module.training != mode for module, mode in modes.items())
        if changed and self._model.training:  # else the whole model is in eval mode, as it was when the run began
            self._note(f"train and eval modes are as in the checkpoint: changed for {changed} of {len(modes)} modules")
        self._set(modes)

    def _present(self) -> dict[nn.Module, bool]:
        return {module: module.training for module in self._model.modules()}

    def _set(self, modes: dict[nn.Module, bool]) -> None:
        # By `train`, which a module may override; modules come before their parts, whose modes it changes too.
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)

    def _begin(self) -> None:
        """Begin a fit: say which modes are changed, or kept."""
        self._begun = True
        if not self._model.training:
            self._model.train()
            self._note(
                "the model was in eval mode, and is trained in train mode; to keep a part of it in eval mode, call "
                "model.train(), then eval() of that part, before fit"
            )
        elif kept := self._topmost_in_eval():
            named = [names.plain(name) for name in list(kept)[:_NAMED]]
            more = f" and {len(kept) - _NAMED} more" if len(kept) > _NAMED else ""
            trained = {each for module in kept.values() for each in module.parameters() if each.requires_grad}
            count = f" (weights are trained there: {len(trained)})" if trained else ""
            what = f"kept in eval mode: {', '.join(named)}{more}{count}"
            self._note(f"{what}; to train all in train mode, call model.train() before fit")
        self._of_steps = self._present()

    def _topmost_in_eval(self) -> dict[str, nn.Module]:
        """Return modules in eval mode, by name, whose parents train."""
        found: dict[str, nn.Module] = {}
        for name, module in self._model.named_modules():
            if not module.training and not any(name.startswith(f"{parent}.") for parent in found):
                found[name] = module
        return found

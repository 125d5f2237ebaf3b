"""Draw training's progress in a terminal: a bar, and under it how the latest steps went."""

from __future__ import annotations

from collections.abc import Iterable

from rich import progress
from rich.console import RenderableType
from rich.text import Text


class Display(progress.Progress):
    """Two lines at the bottom of the terminal that are redrawn; output appears above them. They vanish at the end.

    The bar has its own line: beside three metrics, 80 columns leave it one character.
    """

    def __init__(self, *, steps: int | None) -> None:
        self._words = ""
        columns = ("{task.description}", progress.BarColumn(), progress.MofNCompleteColumn(), "{task.fields[left]}")
        super().__init__(*columns, transient=True)
        self._bar = self.add_task("", total=steps, left="")

    def show(self, place: str, step: int, *, steps: int | None, words: str = "", left: str = "") -> None:
        """Say where training is, by the epoch's name and step, how it went, and how much time is left."""
        self._words = words
        self.update(self._bar, completed=step, total=steps, description=place, left=left)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the two lines; the second is cut off at the width, because a third would not be erased."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self._words, no_wrap=True, overflow="ellipsis")

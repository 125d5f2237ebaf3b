"""A run's folder of checkpoints: names, order, pruning, the newest complete one; and writing behind training."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal

from hvdtrain.checkpoint import files, folders
from hvdtrain.checkpoint.files import Contents, DiskError, Draft
from hvdtrain.errors import CheckpointError
from hvdtrain.system import private_files
from hvdtrain.system.user_paths import expanded

log = logging.getLogger("hvdtrain")

_PROBE_BYTES = 4096  # an exhausted quota may still allow an empty file
_NAME = re.compile(r"epoch-([0-9]{6,})(?:-step-([0-9]{8,}))?")
_LINK = "best"
_LESS_IS_BETTER = ("loss", "error", "mse", "mae")

Mode = Literal["auto", "min", "max"]


def sign(metric: str, mode: Mode) -> float:
    """Return 1.0 where more of `metric` is better, -1.0 where less is; "auto" goes by its name."""
    if mode not in ("auto", "min", "max"):
        raise ValueError(f'mode must be "auto", "min" or "max". Received: {mode!r}')
    if mode == "auto":
        mode = "min" if any(word in metric for word in _LESS_IS_BETTER) else "max"
    return 1.0 if mode == "max" else -1.0


def improves(score: float, best: float, *, min_delta: float = 0.0) -> bool:
    """Return whether a score (a value times its `sign`) is better than the best before; NaN and equal never are."""
    return score > best + min_delta


class Store:
    """The checkpoints in one folder: "epoch-000003" after three epochs, "epoch-000003-step-00000120" 120 steps later.

    The options are those of `hvdtrain.callbacks.Checkpoint`; `best` is a name in meta["metrics"].
    """

    def __init__(
        self, root: str | os.PathLike[str], *, keep_last: int | None = 3, best: str | None = None, mode: Mode = "auto"
    ) -> None:
        if keep_last is not None and (isinstance(keep_last, bool) or keep_last < 1):
            raise ValueError(f"keep_last must be at least 1, or None to keep all. Received: keep_last={keep_last!r}")
        self.root = expanded(root)
        self._keep_last = keep_last
        self._best = best
        self._sign = sign(best or "", mode)
        self._warned = False

    def place(self, epochs_done: int, steps_done: int = 0) -> Path:
        """Return the path of the checkpoint after this many epochs, and steps of the next epoch."""
        return self.root / _name(epochs_done, steps_done)

    def newest_first(self) -> list[Path]:
        """Return the paths of the checkpoints, newest first. They may be damaged, which is found by reading."""
        try:
            paths = {folders.target_of(path) for path in self.root.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise DiskError(f"The checkpoints in {self.root} cannot be listed: {error.strerror}.") from error
        found = {order: path for path in paths if (order := _order(path.name))}
        return [found[order] for order in sorted(found, reverse=True)]

    def check_writable(self, num_bytes: int) -> None:
        """Create the folder; CheckpointError if no checkpoint of this size can be written to it."""
        failed = f"No checkpoint can be written to {self.root} on host {socket.gethostname()}"
        disk = "Free some space, or give a folder on another disk."
        try:
            folders.make(self.root)
            with folders.temporary(self.place(0)) as probe:
                (probe / "probe").write_bytes(bytes(_PROBE_BYTES))
            free = folders.free_bytes(self.root)
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            space = f" ({folders.describe_space(self.root, num_bytes)})" if is_full else ""
            advice = disk if is_full else "Give a folder that this user can write to."
            raise CheckpointError(f"{failed}: {error.strerror or error}{space}. {advice}") from error
        if free is not None and free < num_bytes:
            raise CheckpointError(f"{failed}: {folders.describe_space(self.root, num_bytes)}. {disk}")

    def prune(self) -> None:
        """Delete all checkpoints but the newest, the best, the newest finite one, and those that cannot be read.

        "best" becomes a link to the best one.
        """
        if self._keep_last is None and self._best is None:
            return
        metas = {}
        for path in self.newest_first():
            try:
                metas[path] = files.read_meta(path)
            except CheckpointError as error:
                log.warning("not deleted: %s", error)
        best = None if self._best is None else self._best_of(metas)
        if best is not None:
            self._link(best)
        older = [] if self._keep_last is None else list(metas)[self._keep_last :]
        if not older:
            return
        finite = self.newest_finite()
        if finite in older and not self._warned:
            self._warned = True
            log.warning("%s is not deleted: later checkpoints contain NaN or infinity", finite)
        for path in older:
            if path not in (best, finite) and not path.is_symlink():
                try:
                    folders.remove(folders.locate(path))
                except OSError as error:
                    log.warning("could not delete checkpoint %s: %s", path, error)

    def _link(self, best: Path) -> None:
        """Let the link "best" point to a checkpoint of this folder, if no file has this name."""
        link, new = self.root / _LINK, self.root / f".{_LINK}.new"
        try:
            if os.path.lexists(link) and not link.is_symlink():
                return
            if not link.is_symlink() or os.readlink(link) != best.name:
                new.unlink(missing_ok=True)
                new.symlink_to(best.name)
                new.replace(link)
        except OSError as error:  # a filesystem without links
            log.debug("no link to the best checkpoint: %s", error)

    def describe_best(self) -> str | None:
        """Return which checkpoint is the best and how to load it; None if that is not known."""
        link = self.root / _LINK
        if self._best is None or not link.is_symlink() or not link.exists():
            return None
        value = files.read_meta(link)["metrics"][self._best]
        return (
            f"best checkpoint: {link} -> {os.readlink(link)}, {self._best} {value:.4f}; "
            f'load it: Trainer.load("{link}", model, ...)'
        )

    def newest_finite(self) -> Path | None:
        """Return the path of the newest checkpoint with finite numbers, or None."""
        for path in self.newest_first():
            with suppress(CheckpointError):
                if files.is_finite(path):
                    return path
        return None

    def _best_of(self, metas: dict[Path, dict[str, Any]]) -> Path | None:
        """Return the checkpoint with the best metric; of equal ones the oldest, as EarlyStopping does."""
        best, best_score = None, -math.inf
        for path in reversed(metas):
            metrics = metas[path].get("metrics")
            value = metrics.get(self._best) if isinstance(metrics, dict) else None
            if isinstance(value, (int, float)) and improves(self._sign * value, best_score):
                best, best_score = path, self._sign * value
        return best

    def newest_whole(self) -> tuple[Path, Contents] | None:
        """Return the newest complete checkpoint, or None. A warning names each one that is skipped, and why."""
        for path in self.newest_first():
            try:
                contents = files.scan(path)
            except CheckpointError as error:
                log.warning("skipped: %s", error)
            else:
                return path, contents
        return None

    def clear_leftovers(self) -> None:
        """Remove incomplete files of killed writers, but not those of a live process."""
        folders.clear_leftovers(self.root, lambda name: _order(name) is not None)

    def set_aside(self) -> None:
        """Move the checkpoints, if there are any, into a folder "old-N"."""
        found = self.newest_first()
        if not found:
            return
        aside = next(path for number in count(1) if not (path := self.root / f"old-{number}").exists())
        try:
            private_files.make_folder(aside, exist_ok=False)
            for path in found:
                os.rename(folders.locate(path), aside / path.name)
            if (self.root / _LINK).is_symlink():
                os.rename(self.root / _LINK, aside / _LINK)
            folders.sync(self.root)
        except OSError as error:
            raise CheckpointError(f"The checkpoints in {self.root} could not be moved to {aside}: {error}.") from error
        log.info("moved older checkpoints to %s", aside)


def _name(epochs: int, steps: int) -> str:
    return f"epoch-{epochs:06d}" + (f"-step-{steps:08d}" if steps else "")


def _order(name: str) -> tuple[int, int] | None:
    """Return (epochs, steps) of a checkpoint's name; None for any other name, also with additional zeros."""
    match = _NAME.fullmatch(name)
    order = (int(match[1]), int(match[2] or 0)) if match else None
    return order if order and _name(*order) == name else None


class Writer:
    """Writes one checkpoint at a time in the background.

    A disk's failure costs that checkpoint: it is logged and listed in `lost`. `wait` raises any other error of a write.
    Each write starts a thread, which costs a fraction of a millisecond. It is not a daemon, so an interpreter that ends
    waits for the current write. Call all methods from the thread that trains.
    """

    def __init__(self) -> None:
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self.lost: list[DiskError] = []  # of the checkpoints that the disk has not taken, oldest first
        self.is_last_lost = False

    def submit(
        self, path: str | os.PathLike[str], contents: Contents | Draft, *, then: Callable[[], object] | None = None
    ) -> None:
        """Start writing a copy that training does not change, once the one before has ended; then call `then`."""
        self._idle.wait()
        box: list[Contents | Draft] = [contents]
        try:
            self._idle.clear()
            threading.Thread(target=self._run, args=(box, path, then), name="hvdtrain-checkpoint", daemon=False).start()
        except BaseException:
            # Ctrl-C may come before or after the thread has begun: the one that empties the box ends the work.
            with suppress(IndexError):
                box.pop()
                self._idle.set()
            raise

    def wait(self) -> None:
        """Wait until nothing runs, and raise the first error that is not the disk's, once."""
        # Not Thread.join: before Python 3.13, one that Ctrl-C interrupts takes the thread for ended ever after.
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(
        self, box: list[Contents | Draft], path: str | os.PathLike[str], then: Callable[[], object] | None
    ) -> None:
        try:
            contents = box.pop()  # atomic: only one of two threads gets it
        except IndexError:
            return
        self.is_last_lost = False
        try:
            files.write(path, contents)
            if then is not None:
                then()
        except DiskError as error:
            log.error("%s Training continues.", error)
            _clear_frames(error)
            self.lost.append(error)
            self.is_last_lost = True
        except BaseException as error:  # noqa: BLE001 the thread's outermost frame: the caller raises it
            log.error("%s: %s", type(error).__name__, error)
            _clear_frames(error)
            self._error = self._error or error
        finally:
            del contents  # else the error's traceback would keep the arrays in memory
            self._idle.set()


def _clear_frames(error: BaseException | None) -> None:
    """Release what the frames of an error, and of its causes, hold: arrays as large as the model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__

"""Log to Weights & Biases, offline: a folder here, which `wandb sync` uploads when the user wants it to."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from hvdtrain.callbacks.loggers.logger import Logger, Package, Record, Run
from hvdtrain.system import private_files

_PACKAGE = Package("wandb", "wandb", {"WANDB_ERROR_REPORTING": "false"})  # which would want a network


class WandbLogger(Logger):
    """Log a run for Weights & Biases without a network: `wandb sync FOLDER/wandb/offline-run-...` uploads it.

    Metrics are named "interval/loss", "epoch/val_loss" and so on, by global step. A run that resumes from a
    checkpoint writes a second folder under the same run id, with repeated steps; `wandb sync` merges the folders of one
    id, in order, into one run. W&B's own collection of data (command line, host, git state, code, console output, error
    reports) is off. The configuration is that of `RunFolder`.

    Args:
        project: the run's project.
        folder: where the folder wandb is; None for WANDB_DIR, or the working directory.
        name: the run's name; None for HVDTRAIN_RUN_NAME, or script and time.
        every_s: seconds between two logged intervals; an epoch's last interval is always logged.
        options: the script's own options, as JSON; logged with the configuration.
    """

    def __init__(
        self,
        project: str = "hvdtrain",
        *,
        folder: str | os.PathLike[str] | None = None,
        name: str | None = None,
        every_s: float = 5.0,
        options: dict[str, Any] | None = None,
    ) -> None:
        place = Path(folder or os.environ.get("WANDB_DIR") or ".")
        super().__init__(_OfflineRun(project, place), every_s=every_s, options=options, name=name, package=_PACKAGE)


class _OfflineRun:
    def __init__(self, project: str, folder: Path) -> None:
        self._project = project
        self._folder = folder
        self._run: Any = None

    def open(self, run: Run) -> None:
        wandb: Any = importlib.import_module("wandb")
        private_files.make_folder(self._folder)
        if not os.access(self._folder, os.W_OK):  # W&B would take the system's temporary folder
            raise PermissionError(f"{self._folder} cannot be written to")
        private_files.make_folder(self._folder / "wandb")  # W&B's own files in it have the umask's mode
        self._run = wandb.init(
            project=self._project,
            dir=str(self._folder),
            id=run.id,
            name=run.name,
            mode="offline",
            config={**run.config, **{f"environment.{name}": value for name, value in run.environment.items()}},
            settings=wandb.Settings(
                reinit="create_new",  # besides a run of the script's own
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                save_code=False,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
                x_transaction_log_flush_interval=1.0,  # s: what is not written yet when the process is killed is lost
            ),
        )

    def write(self, record: Record) -> None:
        # An epoch and its last interval have the same step, and so go into one row.
        self._run.log(record.named, step=record.global_step)

    def close(self, *, finished: bool) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if finished else 1)

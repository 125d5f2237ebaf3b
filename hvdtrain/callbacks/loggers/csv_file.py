"""Log to a CSV file, which spreadsheets and pandas read. No package is needed."""

from __future__ import annotations

import csv
import itertools
import logging
import os
from pathlib import Path
from typing import IO, Any

from hvdtrain.callbacks.loggers.logger import Logger, Record, Run
from hvdtrain.system import private_files

log = logging.getLogger("hvdtrain")

_PLACE = ("kind", "time", "epoch", "step", "global_step")
_Row = dict[str, Any]


class CSVLogger(Logger):
    """Log to a CSV file: one row per interval (`kind` is "interval") and per epoch ("epoch"), one column per metric.

    A run that resumes from a checkpoint continues the file after the checkpoint's step; rows of later steps, which are
    repeated, are removed. Any other run begins a new file and renames an older one to log-old-1.csv.

    Args:
        path: the file.
        every_s: seconds between two logged intervals; an epoch's last interval is always logged.
    """

    def __init__(self, path: str | os.PathLike[str], *, every_s: float = 5.0) -> None:
        super().__init__(_CSVFile(Path(path)), every_s=every_s)


class _CSVFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        self._file: IO[str] | None = None

    def open(self, run: Run) -> None:
        private_files.make_folder(self._path.parent)
        self._columns = []
        if self._path.is_file():
            if run.global_step:
                rows = [row for row in self._read() if int(row["global_step"]) <= run.global_step]
                if self._columns:  # else it is empty: killed before its first line
                    self._rewrite(rows)
            else:
                names = (self._path.with_stem(f"{self._path.stem}-old-{number}") for number in itertools.count(1))
                aside = self._path.rename(next(name for name in names if not name.exists()))
                log.info("CSVLogger: moved the older %s to %s", self._path, aside)
        self._append()

    def write(self, record: Record) -> None:
        row: _Row = {name: getattr(record, name) for name in _PLACE} | {"time": f"{record.time:.3f}"}
        row |= {name: repr(value) for name, value in record.values.items()}
        new = [name for name in row if name not in self._columns]
        if new:
            # Which metrics there are is known once they come: an epoch's, such as val_loss, after the first epoch.
            rows = self._read() if self._columns else None
            self._columns += new
            if rows is None:
                self._line(self._columns)
            else:
                self._rewrite(rows)
                self._append()
        self._line([row.get(name) for name in self._columns])

    def close(self, *, finished: bool) -> None:
        if self._file is not None:
            self._file.close()

    def _line(self, cells: list[Any]) -> None:
        assert self._file is not None
        csv.writer(self._file, lineterminator="\n").writerow(cells)
        self._file.flush()

    def _append(self) -> None:
        self.close(finished=False)
        self._file = private_files.open_file(self._path, "a", newline="", encoding="utf-8")

    def _read(self) -> list[_Row]:
        """Return the file's rows, without a last one that was cut short, and take on its columns."""
        text = self._path.read_text(encoding="utf-8")
        reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines(keepends=True))
        rows = list(reader)
        columns = list(reader.fieldnames or [])
        if columns[: len(_PLACE)] != list(_PLACE) and text:
            raise ValueError(f"{self._path} is no file of CSVLogger, and is left as it is: name another one")
        self._columns = columns
        return rows

    def _rewrite(self, rows: list[_Row]) -> None:
        temporary = self._path.with_name(f".{self._path.name}.new")
        temporary.unlink(missing_ok=True)
        with private_files.open_file(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self._path)

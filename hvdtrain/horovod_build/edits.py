"""What is changed in Horovod's sdist, as data: file, old text, new text, why."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from hvdtrain.horovod_build.device_edits import DEVICES
from hvdtrain.horovod_build.edit import Edit
from hvdtrain.horovod_build.elastic_edits import ELASTIC
from hvdtrain.horovod_build.errors import EditMismatchError
from hvdtrain.horovod_build.gloo_edits import GLOO
from hvdtrain.horovod_build.gpu_edits import GPU
from hvdtrain.horovod_build.porting_edits import PORTING
from hvdtrain.horovod_build.runner_edits import RUNNER
from hvdtrain.horovod_build.speed_edits import SPEED

EDITS: tuple[Edit, ...] = (*PORTING, *DEVICES, *SPEED, *GPU, *RUNNER, *ELASTIC, *GLOO)


def apply(source: Path, edits: Iterable[Edit] = EDITS) -> None:
    """Apply `edits`, in order, to the unpacked sdist at `source`.

    Raises:
        EditMismatchError: a file is missing, or holds the old text another number of times than expected.
    """
    for edit in edits:
        target = source / edit.path
        if not target.is_file():
            raise EditMismatchError(
                f"An edit of Horovod's source does not match: {edit.path} is missing. Needed because: {edit.why}."
            )
        text = target.read_text(encoding="utf-8")
        found = text.count(edit.old)
        if found != edit.count:
            raise EditMismatchError(
                f"An edit of Horovod's source does not match: {edit.path} holds {edit.old!r} {found} times, expected "
                f"{edit.count}. Needed because: {edit.why}. This source is not the sdist that hvdtrain knows."
            )
        target.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def fingerprint(edits: Iterable[Edit] = EDITS) -> str:
    """Return a sha256 over what edits do: a wheel built with other edits is another wheel."""
    return hashlib.sha256(json.dumps([(e.path, e.old, e.new, e.count) for e in edits]).encode()).hexdigest()

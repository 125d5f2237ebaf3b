"""What is changed in Horovod's sdist, as data: file, old text, new text, why; and the files that are added."""

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
from hvdtrain.horovod_build.proof_native_edits import PROOF_NATIVE
from hvdtrain.horovod_build.runner_edits import RUNNER
from hvdtrain.horovod_build.speed_edits import SPEED

# Whole files of ours, at the places that they have in the sdist.
ADDED = Path(__file__).parent / "added"

EDITS: tuple[Edit, ...] = (*PORTING, *DEVICES, *SPEED, *GPU, *RUNNER, *ELASTIC, *GLOO, *PROOF_NATIVE)


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


def add(source: Path) -> None:
    """Copy the files of ours into the unpacked sdist at `source`.

    Raises:
        EditMismatchError: the sdist has such a file.
    """
    for path, text in _added().items():
        target = source / path
        if target.exists():
            raise EditMismatchError(f"Horovod's source has a file of its own where ours is to go: {path}.")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def fingerprint(edits: Iterable[Edit] = EDITS) -> str:
    """Return a sha256 over what edits and added files do: a wheel built with others is another wheel."""
    changes = [[(e.path, e.old, e.new, e.count) for e in edits], sorted(_added().items())]
    return hashlib.sha256(json.dumps(changes).encode()).hexdigest()


def _added() -> dict[str, str]:
    files = (path for path in ADDED.rglob("*") if path.is_file() and path.suffix in (".py", ".h", ".cc"))
    return {path.relative_to(ADDED).as_posix(): path.read_text(encoding="utf-8") for path in files}

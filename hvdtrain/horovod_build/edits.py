"""What is changed in Horovod's sdist, as data: file, old text, new text, why; and whole files of ours."""

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
from hvdtrain.horovod_build.proof_edits import PROOF
from hvdtrain.horovod_build.proof_native_edits import PROOF_NATIVE
from hvdtrain.horovod_build.runner_edits import RUNNER
from hvdtrain.horovod_build.speed_edits import SPEED
from hvdtrain.horovod_build.standard_input_edits import STANDARD_INPUT

# Whole files of ours, at the places that they have in the sdist.
ADDED = Path(__file__).parent / "added"

# Whole files of ours in the place of Horovod's, which had little of its own left: path -> sha256 of what is replaced.
REPLACED = Path(__file__).parent / "replaced"
_REPLACED_SHA256 = {
    "horovod/runner/common/util/network.py": "b2bdf0324864d241f9bde0b8583acf2523f66f6c36c34f484009dd35a50ffc4a",
    "horovod/runner/http/http_client.py": "50dc543975a3df3af25a10e082d1c206969cf1ee9923c2b1936dc13ef7fef46e",
    "horovod/runner/http/http_server.py": "f3d31823899951d3b97b5d4cc7ef47d5d81433db65f51a9c7bb0436e920f4272",
    "horovod/runner/util/cache.py": "26e59f0cd0ec3f11ee737f31edab837767ec46deb629ce7d1667ccc08679146c",
}

EDITS: tuple[Edit, ...] = (
    *PORTING, *DEVICES, *SPEED, *GPU, *RUNNER, *ELASTIC, *GLOO, *STANDARD_INPUT, *PROOF, *PROOF_NATIVE,
)  # fmt: skip


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
    for path, text in _files(ADDED).items():
        target = source / path
        if target.exists():
            raise EditMismatchError(f"Horovod's source has a file of its own where ours is to go: {path}.")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def replace(source: Path) -> None:
    """Put the files of ours in the place of Horovod's in the unpacked sdist at `source`.

    Raises:
        EditMismatchError: a file there is not the one that ours was made from.
    """
    for path, text in _files(REPLACED).items():
        target = source / path
        if not target.is_file() or hashlib.sha256(target.read_bytes()).hexdigest() != _REPLACED_SHA256[path]:
            raise EditMismatchError(
                f"Horovod's {path} is not the file that ours takes the place of. This source is not the sdist that "
                "hvdtrain knows."
            )
        target.write_text(text, encoding="utf-8")


def fingerprint(edits: Iterable[Edit] = EDITS) -> str:
    """Return a sha256 over what edits and added files do: a wheel built with others is another wheel."""
    files = [sorted(_files(ADDED).items()), sorted(_files(REPLACED).items())]
    changes = [[(e.path, e.old, e.new, e.count) for e in edits], *files]
    return hashlib.sha256(json.dumps(changes).encode()).hexdigest()


def _files(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix in (".py", ".h", ".cc"))
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}

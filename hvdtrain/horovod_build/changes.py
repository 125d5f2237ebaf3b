"""Change Horovod's sdist: patches, files of ours beside Horovod's, and files of ours in place of Horovod's."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.horovod_build.errors import BuildError

# patches/*.patch, applied in the order of their names; added/ and replaced/, whole files at the places that they have
# in the sdist. replaced/originals.sha256 has the hashes of what is replaced, as sha256sum writes them.
ROOT = Path(__file__).parent

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*")
_UNKNOWN = "This source is not the sdist that hvdtrain knows."


@dataclass(frozen=True)
class Hunk:
    """Lines of one file, and the lines that replace them."""

    path: str
    header: str
    first: int  # index of the first line, once the hunks before this one are applied
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class Patch:
    """One .patch file: its name without the suffix, its text above the first file, its hunks."""

    name: str
    reason: str
    hunks: tuple[Hunk, ...]


def read_patches(root: Path = ROOT) -> list[Patch]:
    """Return the patches in the order in which they are applied."""
    return [_read(path) for path in sorted((root / "patches").glob("*.patch"))]


def change(source: Path, root: Path = ROOT) -> None:
    """Make all changes in the unpacked sdist at `source`; BuildError if the changes are for another source."""
    apply(source, read_patches(root))
    words = (root / "replaced/originals.sha256").read_text(encoding="utf-8").split()
    originals = dict(zip(words[1::2], words[::2], strict=True))
    for path, text in {**_files(root / "added"), **_files(root / "replaced")}.items():
        target = source / path
        found = hashlib.sha256(target.read_bytes()).hexdigest() if target.exists() else None
        if found != originals.get(path):
            problem = "is not the file that ours takes the place of" if path in originals else "is where ours is to go"
            raise BuildError(f"Horovod's {path} {problem}. {_UNKNOWN}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def apply(source: Path, patches: list[Patch]) -> None:
    """Apply `patches` to the unpacked sdist at `source`, each hunk at its line alone."""
    for patch in patches:
        for hunk in patch.hunks:
            target = source / hunk.path
            lines = target.read_bytes().decode().split("\n") if target.is_file() else []
            found = lines[hunk.first : hunk.first + len(hunk.old)]
            if found != list(hunk.old):
                same = next((i for i, line in enumerate(found) if line != hunk.old[i]), len(found))
                raise BuildError(
                    f"Patch {patch.name} does not apply to {hunk.path}, hunk {hunk.header!r}: line "
                    f"{hunk.first + same + 1} is {found[same] if same < len(found) else None!r}, expected "
                    f"{hunk.old[same]!r}. {_UNKNOWN}"
                )
            lines[hunk.first : hunk.first + len(hunk.old)] = hunk.new
            target.write_bytes("\n".join(lines).encode())


def fingerprint(root: Path = ROOT) -> str:
    """Return a sha256 of all changes, without the patches' reasons: other changes need another wheel."""
    patches = (path.read_text(encoding="utf-8") for path in sorted((root / "patches").glob("*.patch")))
    diffs = [text[text.index("\n--- a/") :] for text in patches]
    files = [sorted(_files(root / folder).items()) for folder in ("added", "replaced")]
    return hashlib.sha256(json.dumps([diffs, *files]).encode()).hexdigest()


def _read(path: Path) -> Patch:
    # The first two lines are git's own, and may be left out.
    file = r"^(?:diff --git .*\nindex .*\n)?--- a/"
    reason, *files = re.split(file, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    hunks = []
    for text in files:
        names, *rest = re.split(r"^(?=@@ )", text, flags=re.MULTILINE)
        for part in rest:
            header, *lines = part.removesuffix("\n").split("\n")
            old = tuple(line[1:] for line in lines if line[:1] in (" ", "-"))
            new = tuple(line[1:] for line in lines if line[:1] in (" ", "+"))
            counts = _HUNK.fullmatch(header)
            if (
                counts is None
                or (len(old), len(new)) != (int(counts[1] or 1), int(counts[3] or 1))
                or not all(line[:1] in (" ", "-", "+") for line in lines)
            ):
                raise BuildError(f"{path}: {header!r} is not a hunk of a unified diff, or was cut short")
            hunks.append(Hunk(names.partition("\n")[0], header, int(counts[2]) - 1, old, new))
    return Patch(path.stem, reason.strip(), tuple(hunks))


def _files(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.suffix in (".py", ".h", ".cc"))
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}

"""Code and documents use the field's words, which docs/pages/glossary.md explains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

WORDS = {
    r"anew": "again, or from the beginning",
    r"(go|goes|gone|going|went) on": "continue, or resume from a checkpoint",
    r"(take|takes|taken|taking) up again": "resume",
    r"under ?way": "in flight, or current",
    r"own loops?|loops? of (one's|your|their|his) own": "custom loop",
    r"bad numbers": "non-finite gradients",
    r"told apart": "distinguished",
    r"mend(s|ed)?": "fix",
    r"the pulse": "the heartbeat",
}
# Horovod's files, whose text is part of the key under which its builds are cached.
HOROVODS = ROOT / "hvdtrain" / "horovod_build"


def texts() -> list[Path]:
    """Return what users and newcomers read."""
    code = [
        path
        for path in sorted((ROOT / "hvdtrain").rglob("*.py"))
        if not {HOROVODS / "added", HOROVODS / "replaced"} & set(path.parents)
    ]
    return [*code, ROOT / "README.md", *sorted((ROOT / "docs" / "pages").rglob("*.md"))]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.partition("|")[0])
def test_code_and_documents_use_the_fields_words(word: str) -> None:
    pattern = re.compile(rf"\b(?:{word})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, f"write {WORDS[word]}:\n" + "\n".join(found)


def test_no_message_installs_hvdtrain_itself_from_an_index_that_does_not_have_it() -> None:
    messages = {path: path.read_text(encoding="utf-8") for path in texts() if path.suffix == ".py"}
    found = [
        path
        for path, text in messages.items()
        if re.search(r"pip install [^\n]*hvdtrain\b", text.replace("&& hvdtrain", ""))
    ]
    assert not found, "name the packages of the extra instead"

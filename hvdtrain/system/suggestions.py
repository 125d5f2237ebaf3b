"""Which known word was meant by one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a message: the nearest of the known names, or what to type where there is none."""
    names = list(known)
    begun = [name for name in names if word.strip("-") and name.startswith(word)]
    found = difflib.get_close_matches(word, names, n=1) or (begun if len(begun) == 1 else [])
    return f". Did you mean {found[0]}?" if found else f". {otherwise}" if otherwise else ""

"""Which known word was meant by one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """Return which of `known` was meant by `word`; "" where none is near."""
    names = list(known)
    begun = [name for name in names if word.strip("-") and name.startswith(word)]
    found = difflib.get_close_matches(word, names, n=1) or (begun if len(begun) == 1 else [])
    return found[0] if found else ""


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return the end of a message: the nearest of the known names, or what to type where there is none."""
    near = nearest(word, known)
    return f". Did you mean {near}?" if near else f". {otherwise}"

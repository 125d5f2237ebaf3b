"""Describe what a script has chosen, as JSON, so that two runs can be compared."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping
from typing import Any

from hvdtrain.system import redact

_NUMBER = re.compile(r"-\.?\d")


def name_of(part: Any) -> Any:
    """Return the name of an optimizer, a loss or a function; of several a mapping or a list."""
    if part is None or isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        return {str(key): name_of(each) for key, each in part.items()}
    if isinstance(part, list | tuple):
        return [name_of(each) for each in part]
    if isinstance(part, functools.partial):
        options = ", ".join(f"{name}={value!r}" for name, value in part.keywords.items())
        return f"{name_of(part.func)}({options})"
    return getattr(part, "__qualname__", None) or type(part).__name__


def script_arguments() -> dict[str, str]:
    """Return the script's arguments by option, without secrets; those without an option by their place."""
    found: dict[str, str] = {}
    option = ""
    for place, word in enumerate(redact.words(sys.argv[1:]), start=1):
        if word.startswith("-") and not _NUMBER.match(word):
            option, _, value = word.lstrip("-").partition("=")
            found[option] = value
        elif option:
            found[option] = f"{found[option]} {word}".lstrip()
        else:
            found[str(place)] = word
    hidden: dict[str, str] = redact.document(found)
    return hidden

"""Write docs/pages/reference/names.md: the names on the reference's pages, with the first line of their docstrings.

mkdocs makes the reference from the code. This page can be read in the repository. `python scripts/names.py` writes it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs/pages/reference"
PAGE = REFERENCE / "names.md"
_PAGES = ("hvdtrain.md", "callbacks.md", "torch.md", "keras.md", "tensorflow.md")
_HEAD = """# All names

One line for each public name, from its docstring. `help(hvdtrain.Trainer)` in Python prints arguments and errors;
`make docs` builds a site with all of them. `python scripts/names.py` writes this page.
"""
_ENTRY = re.compile(r"^::: (\S+)((?:\n    .*)*)", re.MULTILINE)
_MEMBERS = re.compile(r"members: \[(.*?)\]")


def text() -> str:
    """Return the page."""
    parts = [_HEAD]
    for name in _PAGES:
        page = (REFERENCE / name).read_text(encoding="utf-8")
        rows = [f"| `{short}` | {line} |" for entry in _ENTRY.finditer(page) for short, line in _lines(entry)]
        title = page.partition("\n")[0].removeprefix("# ")
        parts.append("\n".join([f"## {title}\n", "| Name | |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _lines(entry: re.Match[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of one entry of a page, each with one line: a class, a function, or a module's members."""
    path = entry[1]
    file = _file(path)
    if file is None:  # a class or function
        module, _, name = path.rpartition(".")
        yield name, _summary(module, name)
        return
    chosen = _MEMBERS.search(entry[2])
    names = chosen[1].split(", ") if chosen else [name for name in _definitions(file) if not name.startswith("_")]
    for name in names:
        yield name, _summary(path, name)


def _file(module: str) -> Path | None:
    base = ROOT / module.replace(".", "/")
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def _definitions(file: Path) -> dict[str, ast.AST]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def _summary(module: str, name: str) -> str:
    """Return the first line of a docstring."""
    file = _file(module)
    found = _definitions(file).get(name) if file else None
    if not isinstance(found, ast.ClassDef | ast.FunctionDef):
        raise SystemExit(f"{module} has no {name}, which the reference names")
    return (ast.get_docstring(found) or "").partition("\n")[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")

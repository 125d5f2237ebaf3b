"""Write docs/pages/reference/names.md: the names on the reference's pages, with the first line of their docstrings.

mkdocs makes the reference from the code. This page can be read in the repository. `python scripts/names.py` writes it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs/pages/reference"
PAGE = REFERENCE / "names.md"
_PAGES = (
    "hvdtrain.md", "callbacks.md", "torch.md", "lightning.md", "keras.md", "tensorflow.md", "transformers.md",
)  # fmt: skip
_HEAD = """# All names

One line for each public name, from its docstring, with the path to import it by. `help(hvdtrain.Trainer)` in Python
prints arguments and errors; `make docs` builds a site with all of them. `python scripts/names.py` writes this page.
"""
_ENTRY = re.compile(r"^::: (\S+)((?:\n    .*)*)", re.MULTILINE)
_MEMBERS = re.compile(r"members: \[(.*?)\]")


def text() -> str:
    """Return the page."""
    parts = [_HEAD]
    for name in _PAGES:
        page = (REFERENCE / name).read_text(encoding="utf-8")
        rows = [f"| `{path}` | {line} |" for entry in _ENTRY.finditer(page) for path, line in _lines(entry)]
        title = page.partition("\n")[0].removeprefix("# ")
        parts.append("\n".join([f"## {title}\n", "| Name | |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _lines(entry: re.Match[str]) -> Iterator[tuple[str, str]]:
    """Yield the paths of one entry of a page, each with one line: a class, a function, or a module's members."""
    path = entry[1]
    file = _file(path)
    if file is None:  # a class or function
        module, _, name = path.rpartition(".")
        yield _import_path(module, name), _summary(module, name)
        return
    chosen = _MEMBERS.search(entry[2])
    names = chosen[1].split(", ") if chosen else [name for name in _definitions(file) if not name.startswith("_")]
    for name in names:
        yield _import_path(path, name), _summary(path, name)


def _import_path(module: str, name: str) -> str:
    """Return the shortest path of what `module` defines as `name`: a package above may have it too."""
    parts = module.split(".")
    packages = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next(f"{package}.{name}" for package in packages if _home(package, name) == module)


def _home(module: str, name: str) -> str | None:
    """Return the module that defines what `module` has as `name`, by its import statements; None if it has no such."""
    file = _file(module)
    if file is None:
        return None
    if name in _definitions(file):
        return module
    for source, alias in _imports(file):
        if name == (alias.asname or alias.name):
            return _home(source, alias.name)
        if alias.name == "*" and (home := _home(source, name)):
            return home
    return None


def _file(module: str) -> Path | None:
    base = ROOT / module.replace(".", "/")
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def _definitions(file: Path) -> dict[str, ast.AST]:
    return {node.name: node for node in _tree(file).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@functools.cache
def _imports(file: Path) -> list[tuple[str, ast.alias]]:
    """Return (module, name) of each `from module import name`, also for type checkers alone."""
    found = [node for node in ast.walk(_tree(file)) if isinstance(node, ast.ImportFrom)]
    return [(node.module, alias) for node in found if node.module for alias in node.names]


def _summary(module: str, name: str) -> str:
    """Return the first line of a docstring."""
    file = _file(module)
    found = _definitions(file).get(name) if file else None
    if not isinstance(found, ast.ClassDef | ast.FunctionDef):
        raise SystemExit(f"{module} has no {name}, which the reference names")
    return (ast.get_docstring(found) or "").partition("\n")[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")

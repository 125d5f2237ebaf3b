"""The site's pages: all of them can be reached, and every link, name and message in them is there.

Without mkdocs, which `make docs` needs and set-up does not install.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PAGES = ROOT / "docs" / "pages"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
    *sorted(PAGES.rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]

FENCE = re.compile(r"^ *(```+|~~~+)(\w*)[^\n]*\n(.*?)^ *\1 *$", re.MULTILINE | re.DOTALL)


def leaves(tree: Any) -> Iterator[str]:
    """Return the files that a navigation names."""
    for each in tree:
        value = next(iter(each.values())) if isinstance(each, dict) else each
        yield from [value] if isinstance(value, str) else leaves(value)


def prose(path: Path) -> str:
    """Return a document without its blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Return what a link to one of a document's headings may end with."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / site["docs_dir"]).resolve() == PAGES
    assert sorted(leaves(site["nav"])) == sorted(path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_resolves(path: Path) -> None:
    text = re.sub(r"`[^`]*`", "", prose(path))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), f"{path.name} links to {link}"
        if PAGES in path.parents:
            assert PAGES in target.parents, f"{path.name} links to {link}, which the site does not have"
        if anchor:
            assert anchor in anchors(target), f"{path.name} links to {link}: it has {sorted(anchors(target))}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_of_a_block_fit_the_sites_100_columns(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    blocks = [textwrap.dedent(body) for _, _, body in FENCE.findall(text)]
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 100]


@pytest.mark.parametrize("path", sorted(PAGES.rglob("*.md")), ids=lambda path: path.relative_to(PAGES).as_posix())
def test_a_page_begins_with_a_sentence(path: Path) -> None:
    """What the reader gets: no heading, block, table or picture."""
    title, first = path.read_text(encoding="utf-8").split("\n\n")[:2]
    assert re.fullmatch(r"# .+", title)
    assert re.match(r"[\w`\[\"].*[.:]$", " ".join(first.split())), first


def test_an_introduction_that_names_gpus_says_that_none_has_run_it() -> None:
    """No GPU has: whoever has run `make gpu` on one changes this test with the documents."""
    introductions = [prose(path).split("\n\n")[1] for path in (ROOT / "README.md", PAGES / "index.md")]
    description = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "description" in line)
    for text in [*introductions, description]:
        assert "GPU" not in text or "no GPU has run it" in " ".join(text.split()), text


def module(name: str) -> tuple[Path, list[str]]:
    """Return the file of the module that a dotted name begins with, and the rest of the name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:count])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.exists():
                return file, parts[count:]
    raise AssertionError(f"there is no module {name}")


def defined(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return the classes and functions of a module or class."""
    return {each.name: each for each in body if isinstance(each, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))}


def members(name: str) -> dict[str, ast.stmt]:
    """Return what is defined in a module or class; fails where there is no such thing."""
    file, rest = module(name)
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for part in rest:
        found = defined(body)
        assert part in found, f"{name}: {part} is not defined in {file.relative_to(ROOT)}"
        body = getattr(found[part], "body", [])
    return defined(body)


def test_the_reference_shows_names_that_are_defined() -> None:
    shown = 0
    for page in PAGES.rglob("*.md"):
        for name, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", page.read_text(encoding="utf-8"), re.MULTILINE):
            found = members(name)
            listed = (yaml.safe_load(textwrap.dedent(options)) or {}).get("options", {}).get("members") or []
            assert not set(listed) - set(found), f"{page.name}: {name}"
            shown += 1
    assert shown, "no page names anything"


def pattern_of(pieces: list[str | None]) -> re.Pattern[str] | None:
    """Return what matches a text of hvdtrain's, None standing for what is put in; None for a text of a few letters."""
    split = [[None] if each is None else re.split(r"%[sdgr]", each) for each in pieces]
    if sum(len(re.sub(r"\W", "", text)) for texts in split for text in texts if text) < 10:
        return None
    # At the ends less is taken for what is put in: it would hide what stands beside the text.
    ends = ".{0,30}?" if pieces[0] is None else "", ".{0,30}" if pieces[-1] is None else ""
    parts = [".{0,160}?".join(re.escape(re.sub(r"\s+", " ", text or "")) for text in texts) for texts in split]
    middle = ".{0,160}?".join(part for part in parts if part)
    return re.compile(ends[0] + middle + ends[1])


@functools.cache
def messages() -> list[re.Pattern[str]]:
    """Return what matches each text in hvdtrain's code."""
    found = []
    for file in (ROOT / "hvdtrain").rglob("*.py"):
        inside: set[ast.AST] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                inside.update(node.values)
                found.append(pattern_of([str(v.value) if isinstance(v, ast.Constant) else None for v in node.values]))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
                found.append(pattern_of([node.value]))
    return [each for each in found if each is not None]


def unknown(message: str) -> list[str]:
    """Return the parts of a message that no text in hvdtrain's code has."""
    message = f" {' '.join(message.split())} "
    known = [False] * len(message)
    for pattern in messages():
        for match in pattern.finditer(message):
            known[match.start() : match.end()] = [True] * (match.end() - match.start())
    rest = "".join("\n" if is_known else letter for letter, is_known in zip(message, known, strict=True))
    return [part.strip() for part in rest.splitlines() if len(re.sub(r"\W", "", part)) > 10]


def test_messages_in_the_troubleshooting_page_are_hvdtrains() -> None:
    text = (PAGES / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [body for _, language, body in FENCE.findall(text) if language == "text"]
    assert quoted
    for message in quoted:
        assert not unknown(message), message


def test_a_message_that_hvdtrain_does_not_have_would_be_found() -> None:
    assert (
        unknown("rank 0 (host a): Horovod itself is stuck: a rank no longer answers. This process ends, status 76.")
        == []
    )
    assert unknown("Horovod itself is stuck: a rank does not answer, so that this process ends.") != []


def test_messages_in_the_index_of_the_troubleshooting_page_are_hvdtrains() -> None:
    symptoms, _, index = prose(PAGES / "troubleshooting.md").partition("## By message")
    rows = re.findall(r"^\| (`.+?) \| .+ \|$", index.partition("Messages of others")[0], re.MULTILINE)
    assert len(rows) > 20
    bullets = re.findall(r"- \*\*(`[^*]+`)\*\*", " ".join(symptoms.split()))
    assert len(bullets) > 5
    rows += bullets
    texts = [
        re.sub(r"\s+", " ", node.value)
        for file in (ROOT / "hvdtrain").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "hvdtrain/horovod_build/patches").iterdir()]
    for row in rows:
        for message in re.findall(r"`(.+?)`", row):
            for piece in filter(None, (part.strip() for part in message.split("..."))):
                assert any(piece in text for text in texts), f"{message}: {piece}"


def test_the_settings_page_has_every_variable_that_hvdtrain_reads_or_sets() -> None:
    named = {
        name
        for file in (ROOT / "hvdtrain").rglob("*")
        if file.is_file() and file.suffix != ".pyc"
        for name in re.findall(r"HVDTRAIN_[A-Z0-9_]*[A-Z0-9](?![:_])\b", file.read_text(encoding="utf-8"))
        if not (file.suffix == ".h" and name.endswith("_H"))  # C++'s include guards
    }
    assert len(named) > 20
    page = (PAGES / "settings.md").read_text(encoding="utf-8")
    assert not [name for name in sorted(named) if f"`{name}`" not in page]

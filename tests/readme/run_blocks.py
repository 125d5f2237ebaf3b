"""Run code blocks as a reader would: every ```bash and ```python block, in order, in one copy of the tree.

    python tests/readme/run_blocks.py [--only LINE] [--list] [DOCUMENT ...]

Without a document: README.md's, then those of each page in docs/pages. A page relies on no other one, so that any of
them can be run alone; all share the copy, whose modules are then compiled once.

- A python block whose first line is a comment like `# train.py` is saved under that name first, for later blocks.
- `<!-- ci: skip, KIND: reason -->` on the line above a block leaves it out; KIND is one of `docker`, `multi-host`,
  `gpu` and `ci` (what .ci/run does itself). `<!-- ci: limit 900 -->` replaces the time limit, in seconds.
  `<!-- ci: file -->` only saves a named python block, which a later bash block must run, on several ranks say.
- Blocks in other languages are shown to the reader only. A block without a language is an error: it would be skipped
  silently.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = ("bash", "python")
SKIP_KINDS = ("docker", "multi-host", "gpu", "ci")
DEFAULT_LIMIT_S = 600.0
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "shared")


class DocumentError(ValueError):
    """A document cannot be read as blocks; the message has the line."""


@dataclass(frozen=True)
class Block:
    """One fenced block: where its fence opens, its language and text, and what a comment above it says."""

    line: int
    language: str
    text: str
    skip: str = ""
    limit_s: float = DEFAULT_LIMIT_S
    is_file: bool = False

    @property
    def file_name(self) -> str | None:
        """The name that a python block's first line gives it."""
        match = re.match(r"# ([\w-]+\.py)\n", self.text)
        return match.group(1) if match and self.language == "python" else None


def read(text: str) -> list[Block]:
    """Return the blocks of a markdown text.

    Raises:
        DocumentError: a fence without a language or without an end, or a comment for CI that is not understood.
    """
    blocks: list[Block] = []
    directive: dict[str, str] = {}
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        fence = re.fullmatch(r"( *)(```+|~~~+)(.*)", line)
        if comment := re.fullmatch(r"\s*<!--\s*ci:(.*)-->\s*", line):
            directive = _directive(comment.group(1).strip(), at + 1)
        elif fence:
            opened, (indent, mark, language) = at + 1, fence.groups()
            at += 1
            body: list[str] = []
            while at < len(lines) and not re.fullmatch(rf" *{mark}+ *", lines[at]):
                body.append(lines[at].removeprefix(indent))
                at += 1
            if at == len(lines):
                raise DocumentError(f"line {opened}: the block that opens here has no end")
            if not language.strip():
                raise DocumentError(f"line {opened}: a block needs a language; use text for what is not to be run")
            blocks.append(
                Block(
                    opened,
                    language.split()[0],
                    "\n".join(body) + "\n",
                    directive.get("skip", ""),
                    float(directive.get("limit", DEFAULT_LIMIT_S)),
                    "file" in directive,
                )
            )
            directive = {}
        elif directive:
            raise DocumentError(f"line {at + 1}: a ci comment belongs on the line right above a block")
        at += 1
    if directive:
        raise DocumentError(f"line {len(lines)}: a ci comment belongs on the line right above a block")
    _check_files(blocks)
    return blocks


def _check_files(blocks: Sequence[Block]) -> None:
    """Raise DocumentError for a block that is only saved, and then run by none."""
    for at, block in enumerate(blocks):
        name = block.file_name
        later = [each.text for each in blocks[at + 1 :] if each.language == "bash" and not each.skip]
        if block.is_file and not (name and any(name in text for text in later)):
            raise DocumentError(
                f"line {block.line}: a file needs a name, as a comment in its first line, and a bash block that runs it"
            )


def _directive(text: str, line: int) -> dict[str, str]:
    if text == "file":
        return {"file": ""}
    if match := re.fullmatch(r"limit (\d+)", text):
        return {"limit": match.group(1)}
    if match := re.fullmatch(rf"skip, ({'|'.join(SKIP_KINDS)}): (\S.*)", text):
        return {"skip": f"{match.group(1)}: {match.group(2)}"}
    raise DocumentError(
        f"line {line}: expected `ci: file`, `ci: limit SECONDS` or `ci: skip, KIND: reason` with KIND one of "
        f"{', '.join(SKIP_KINDS)}. Received: ci: {text}"
    )


def save_block(block: Block, folder: Path) -> Path:
    """Write a python block into `folder` and return the file."""
    path = folder / (block.file_name or f"block-line-{block.line}.py")
    path.write_text(block.text, encoding="utf-8")
    return path


def run_block(block: Block, folder: Path) -> str:
    """Run one block in `folder` and return why it failed, with the end of its output; "" if it did not."""
    if block.language == "bash":
        command = ["bash", "-euo", "pipefail", "-c", block.text]
    else:
        command = ["python", save_block(block, folder).name]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(folder / ".venv/bin"), os.environ["PATH"]]),
        "PYTHONWARNINGS": "default",
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout=block.limit_s)
            problem = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"no end within {block.limit_s:g} s"
        if problem:
            _end_session(process)
        log.seek(0)
        output = log.read().decode(errors="replace")
    return f"{problem}\n" + "\n".join(output.splitlines()[-60:]) if problem else ""


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End what the block started and left: its session first gets a chance to end its own children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def copy_tree(target: Path) -> None:
    """Copy the project as a reader has it, and lend it this project's environment if there is one."""
    shutil.copytree(ROOT, target, ignore=NOT_COPIED, symlinks=True)
    if (ROOT / ".venv").is_dir():
        (target / ".venv").symlink_to(ROOT / ".venv")


def documents() -> list[Path]:
    """Return README.md and the site's pages, whose order is that of their names."""
    return [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").rglob("*.md"))]


def main(arguments: Sequence[str]) -> int:
    """Run the blocks and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("documents", nargs="*", type=Path, metavar="DOCUMENT", help="default: README.md and all pages")
    parser.add_argument("--only", type=int, metavar="LINE", help="only the block of DOCUMENT whose fence opens there")
    parser.add_argument("--list", action="store_true", help="show the blocks and stop")
    options = parser.parse_args(arguments)
    if options.only is not None and len(options.documents) != 1:
        parser.error(f"--only needs the one document that its line is in. Received: {len(options.documents)} documents")
    found: list[tuple[str, Block]] = []
    for path in options.documents or documents():
        name = path.resolve().relative_to(ROOT).as_posix() if path.resolve().is_relative_to(ROOT) else path.name
        try:
            blocks = read(path.read_text(encoding="utf-8"))
        except (OSError, DocumentError) as problem:
            print(f"{path}: {problem}\n0 passed, 1 failed")
            return 1
        blocks = [block for block in blocks if block.language in RUN and options.only in (None, block.line)]
        found += [(f"{name}:{block.line} {block.language}", block) for block in blocks]
    if options.list:
        for label, block in found:
            print(f"{label} {block.skip and 'skipped, ' + block.skip}".rstrip())
        return 0
    return run(found)


def run(found: Sequence[tuple[str, Block]]) -> int:
    """Run blocks, each with what to call it, say how each went, and return the exit status."""
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="hvdtrain-readme-") as base:
        folder = Path(base) / "hvdtrain"
        copy_tree(folder)
        for label, block in found:
            if block.skip:
                print(f"{label}: skipped, {block.skip}", flush=True)
                continue
            if block.is_file:
                print(f"{label}: saved as {save_block(block, folder).name}", flush=True)
                continue
            started = time.monotonic()
            problem = run_block(block, folder)
            seconds = time.monotonic() - started
            passed, failed = passed + (not problem), failed + bool(problem)
            print(f"{label}: {f'FAILED, {problem}' if problem else 'ok'} ({seconds:.0f} s)", flush=True)
    if passed + failed == 0:
        print("no block ran")
        failed = 1
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Run every attack of this folder, and print a table: attack, what came of it before, what comes of it now, seconds.

    python tests/attack/run.py            # needs root, to run programs as another user
    python tests/attack/run.py --page     # and put the table into docs/pages/security.md

The table is written to build/attack.md. The exit status is 1 where an attack succeeded, or no test ran.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from table import ROWS, Row  # noqa: E402

ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "pages" / "security.md"
BEGIN, END = "<!-- make attack -->", "<!-- end of make attack -->"


@dataclass
class Result:
    """The result of one test function, over all its parameters."""

    passed: int = 0
    failed: int = 0
    skipped: str = ""
    seconds: float = 0.0


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(description="Run every attack of tests/attack.")
    parser.add_argument("--page", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    parser.add_argument("pytest", nargs="*", help="after --: arguments of pytest, such as -k secrets")
    given = parser.parse_args()
    if os.geteuid() != 0:
        print("make attack needs root: it runs programs as another user. Try: sudo make attack", file=sys.stderr)
        return 2
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    report = build / "attack.xml"
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", str(HERE), f"--junitxml={report}", *given.pytest]
    status = subprocess.run(words, cwd=ROOT, check=False).returncode
    results = read(report)
    text = render(results)
    (build / "attack.md").write_text(text, encoding="utf-8")
    print("\n" + text)
    if given.page:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    return status


def read(report: Path) -> dict[str, Result]:
    """Return the results by file::function."""
    found: dict[str, Result] = defaultdict(Result)
    for case in ET.parse(report).iter("testcase"):
        file = case.get("classname", "").rpartition(".")[2]
        result = found[f"{file}.py::{case.get('name', '').partition('[')[0]}"]
        result.seconds += float(case.get("time", 0))
        skip = case.find("skipped")
        if skip is not None:
            result.skipped = skip.get("message", "")
        elif case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
        else:
            result.passed += 1
    return found


def render(results: dict[str, Result]) -> str:
    """Return the table, in Markdown."""
    known = {test for row in ROWS for test in row.tests}
    more = [Row(_claim(test), "", "refused", (test,)) for test in sorted(results) if test not in known]
    lines = [f"Run on {datetime.date.today()}, as root, the attacker as another user of the same host.", ""]
    lines += ["| Attack | Before | Now | Seconds |", "|---|---|---|---|"]
    for row in (*ROWS, *more):
        mine = [results[test] for test in row.tests if test in results]
        lines.append(f"| {row.attack} | {row.before} | {_now(row, mine)} | {sum(each.seconds for each in mine):.0f} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, table: str) -> str:
    """Return the page with this table in place of its own."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"{PAGE} has no place for the table, {BEGIN} to {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n\n{table}\n{END}", page)


def _now(row: Row, results: list[Result]) -> str:
    if any(each.failed for each in results):
        return "**FAILED**"
    if any(each.passed for each in results):
        return row.now
    reason = next((each.skipped for each in results if each.skipped), "no test of it was found")
    return f"not run: {reason}"


def _claim(test: str) -> str:
    return test.partition("::test_")[2].replace("_", " ")


if __name__ == "__main__":
    sys.exit(main())

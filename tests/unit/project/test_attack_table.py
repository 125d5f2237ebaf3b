"""The table of attacks: no test without a row, no row without a test, and the page has them all."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ATTACK = ROOT / "tests" / "attack"


@pytest.fixture(scope="module")
def table(load_script):
    return load_script("attack/table.py").ROWS


@pytest.fixture
def runner(load_script, table):
    return load_script("attack/run.py")


def test_every_attack_has_a_row_and_every_row_its_tests(table):
    tests = {
        f"{path.name}::{each.name}"
        for path in ATTACK.glob("test_*.py")
        for each in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
    }
    named = [test for row in table for test in row.tests]
    assert sorted(named) == sorted(set(named))
    assert sorted(named) == sorted(tests)


def test_the_page_has_the_table_with_its_date(table):
    page = (ROOT / "docs" / "pages" / "security.md").read_text(encoding="utf-8")
    assert re.search(r"^Run on 20\d\d-\d\d-\d\d, ", page, re.MULTILINE)
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    shown = {cells[0].removeprefix("| "): cells[1:] for cells in rows}
    for row in table:
        assert shown.get(row.attack, ["missing"])[0] == row.before, row.attack
        assert shown[row.attack][1] == row.now or shown[row.attack][1].startswith("not run: "), row.attack


def test_a_table_says_what_failed_what_did_not_run_and_what_has_no_row(runner, table, tmp_path):
    first, second = table[0].tests[0], table[1].tests[0]
    cases = ""
    for test, inner in [(first, "<failure/>"), (second, '<skipped message="no root"/>'), ("x.py::test_a_b", "")]:
        file, _, name = test.partition(".py::")
        cases += f'<testcase classname="tests.attack.{file}" name="{name}[a]" time="1.4">{inner}</testcase>'
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    text = runner.render(runner.read(tmp_path / "report.xml"))
    assert f"| {table[0].attack} | {table[0].before} | **FAILED** | 1 |" in text
    assert f"| {table[1].attack} | {table[1].before} | not run: no root | 1 |" in text
    assert "| a b |  | refused | 1 |" in text
    page = runner.with_table(f"a\n{runner.BEGIN}\nstale\n{runner.END}\nb", text)
    assert "stale" not in page
    assert page.startswith("a\n")
    assert page.endswith("\nb")

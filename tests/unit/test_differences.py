"""docs/differences.md: every chosen difference from DCP names a test, and that test exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "differences.md").read_text()
ROWS = re.findall(r"^\| ([SLEMD]\d+) \|", PAGE, re.MULTILINE)
TESTS = dict(re.findall(r"^\* ([SLEMD]\d+): `([^`]+)`$", PAGE, re.MULTILINE))


def test_every_difference_names_its_test():
    assert ROWS
    assert sorted(TESTS) == sorted(ROWS)


def test_every_named_test_exists():
    missing = []
    for row, test in TESTS.items():
        path, _, name = test.partition("::")
        file = ROOT / path
        if not file.exists() or f"def {name}(" not in file.read_text():
            missing.append((row, test))
    assert missing == []

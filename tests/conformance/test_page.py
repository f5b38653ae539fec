"""docs/conformance.md matches the tests' marks."""

from __future__ import annotations

import re
import subprocess
import sys

from docs.make_conformance import NOT_APPLICABLE, PAGE, PARTLY, ROOT, rules


def test_the_page_is_current() -> None:
    # In a process of its own: pytest does not run inside pytest.
    command = [sys.executable, "-W", "ignore", "-m", "docs.make_conformance", "--print"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE.read_text(encoding="utf-8"), "run `python -m docs.make_conformance`"


def test_every_rule_is_accounted_for() -> None:
    known = rules()
    assert len(known) == 301
    listed = re.findall(r"^\| ([A-Z]{2}-\d\d) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(known)
    assert NOT_APPLICABLE.keys() | PARTLY.keys() <= known.keys()
    (proven,) = re.findall(r"^301 rules: (\d+) proven", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert f"| {proven} of 301 |" in (ROOT / "README.md").read_text(encoding="utf-8")

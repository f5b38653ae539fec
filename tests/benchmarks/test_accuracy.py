"""The committed accuracy of bfloat16 and float16, and its page."""

from __future__ import annotations

import json

from benchmarks.accuracy import KEPT, PAGE, REASONS, above, lines

ROWS = json.loads(KEPT.read_text())


def test_models_above_a_bound_have_a_reason_and_no_others() -> None:
    assert {n for n, found in ROWS.items() if above(found)} == set(REASONS)


def test_the_page_shows_the_committed_rows() -> None:
    assert PAGE.read_text() == "\n".join(lines(ROWS)) + "\n"

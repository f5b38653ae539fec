"""Figures on pages match docs/figures.json, and that file matches its sources."""

from __future__ import annotations

import json

import pytest

from docs import make_figures
from docs.make_figures import QUOTES, filled, unquoted
from tests.support.helpers import ROOT

FIGURES: dict[str, str] = json.loads(make_figures.KEPT.read_text())


def test_the_file_is_current() -> None:
    assert make_figures.figures() == FIGURES, "python -m docs.make_figures"


@pytest.mark.parametrize("page", QUOTES)
def test_pages_quote_current_figures(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert filled(text, page, FIGURES) == text, "python -m docs.make_figures"
    assert unquoted(text, page) == [], "quote it in docs/make_figures.py, or say above it what measures it"


def test_a_wrong_figure_is_found() -> None:
    page, known = "docs/coming_from/onnxruntime.md", FIGURES | {"microsoft": "1"}
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "1 are supported" in filled(text, page, known)
    with pytest.raises(ValueError, match="no longer says"):
        filled(text.replace("are supported", "were supported"), page, known)
    assert unquoted(text + "\nIt runs at 0.59 of the speed.\n", page) == ["0.59"]

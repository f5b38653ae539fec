"""The page of ``Model.draw`` in a browser: views, search, expanding and collapsing scopes."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import onnx
import pytest

import onnx2jax
from tests.model.reports.test_draw import NESTED, chain
from tests.support.models import text_model

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=20000"),
]

LOOK = """
const states = {errors: []}
onerror = message => states.errors.push(message)
const look = () => ({
  views: views.filter(v => !v.hidden).length,
  blocks: [...shown().querySelectorAll('.block')].filter(b => b.getBoundingClientRect().width > 0).length,
  depth: depth.selectedOptions[0].textContent,
  found: found.textContent,
  marked: shown().querySelectorAll('.match').length,
})
const type = text => { search.value = text; search.dispatchEvent(new Event('input')) }
const pick = value => { depth.value = value; depth.dispatchEvent(new Event('change')) }
const inside = block => {
  const a = block.getBoundingClientRect(), b = shown().getBoundingClientRect()
  return a.top >= b.top && a.bottom <= b.bottom
}
"""
SCRIPT = """
states.first = look()
shown().querySelector('.scope').dispatchEvent(new MouseEvent('click', {bubbles: true}))
states.opened = look()
pick(views.length - 1)
states.all = look()
type('/layer.17/part.3/n704')
states.searched = look()
const match = shown().querySelector('.match')
states.before = inside(match)
search.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))
states.after = inside(match)
pick(0)
states.closed = look()
type('no such thing')
states.nothing = look()
"""
RESULT = """
const result = document.createElement('pre')
result.id = 'result'
result.textContent = JSON.stringify(states)
document.body.append(result)
"""


OPENING = """
pick(0)
shown().querySelector('.closed').dispatchEvent(new MouseEvent('click', {bubbles: true}))
type('relu')
states.opened = look()
"""


def recorded(model: onnx.ModelProto, script: str, folder: Path) -> dict[str, Any]:
    """The states of a model's page that a script records."""
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH to open a page with")
    page = onnx2jax.convert(model).draw(folder / "page.html")
    text = page.read_text()
    page.write_text(text.replace("</body>", f"<script>{LOOK}{script}{RESULT}</script></body>"))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search('<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    facts: dict[str, Any] = json.loads(html.unescape(found[1]))
    return facts


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The state of a page of a thousand nodes after each step."""
    names = [f"/layer.{i // 40}/part.{i % 40 // 8}/n{i}" for i in range(1000)]
    return recorded(chain(names), SCRIPT, tmp_path_factory.mktemp("browser"))


@pytest.mark.extended
def test_a_click_opens_a_body(tmp_path: Path) -> None:
    states = recorded(text_model(NESTED), OPENING, tmp_path)
    assert states["errors"] == []
    assert states["opened"] == {
        "views": 1,
        "blocks": 18,
        "depth": "all nodes, bodies open (18)",
        "found": "1 found",
        "marked": 1,
    }


def test_the_first_view_is_no_larger_than_a_page(states: dict[str, Any]) -> None:
    assert states["errors"] == []
    assert states["first"] == {"views": 1, "blocks": 27, "depth": "1 (27)", "found": "", "marked": 0}


def test_scopes_expand_and_collapse(states: dict[str, Any]) -> None:
    assert (states["opened"]["blocks"], states["opened"]["depth"]) == (127, "2 (127)")
    assert (states["all"]["blocks"], states["all"]["depth"]) == (1002, "all nodes (1002)")
    assert (states["closed"]["blocks"], states["closed"]["views"]) == (27, 1)


def test_search_finds_and_scrolls_to_names(states: dict[str, Any]) -> None:
    assert (states["searched"]["found"], states["searched"]["marked"]) == ("1 found", 1)
    assert (states["before"], states["after"]) == (False, True)
    assert states["closed"]["found"] == "1 found"  # the scope that holds it
    assert states["nothing"]["found"] == "0 found"

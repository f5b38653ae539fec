"""The page of ``Model.draw`` in a browser: a click, search, zoom, layers, branches. One process for all facts."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import onnx2jax
from tests.model.reports.test_page import NAME, network

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=20000"),
    *("--window-size=1280,800", "--force-prefers-reduced-motion"),
]
BEFORE = "const states = {errors: []}\nonerror = message => { states.errors.push(message) }\n"
SCRIPT = """
const shownBlocks = () => [...blocks.values()].filter(b => !b.open && b !== root)
const look = () => ({
  titles: shownBlocks().map(b => b.text || b.rows.map(opOf).join(', ')),
  panel: panel.hidden ? '' : panel.querySelector('h2').textContent,
  drawn: view.querySelectorAll('.block').length,
})
const press = (target, x = 0, y = 0) => {
  target.dispatchEvent(new PointerEvent('pointerdown', {bubbles: true, pointerId: 1, clientX: x, clientY: y}))
  dispatchEvent(new PointerEvent('pointerup', {bubbles: true, pointerId: 1, clientX: x, clientY: y}))
}
const block = title => view.querySelector(`[data-id="${[...blocks.values()].find(b => b.title === title).id}"]`)
const type = text => { search.focus(); search.value = text; search.dispatchEvent(new Event('input')) }
const key = (key, target = document.body) => target.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))
const centred = id => {
  const {x, y, w, h} = blocks.get(id).absolute, r = room()
  const across = (x + w / 2) * at.k + at.x - r.x - r.w / 2, down = (y + h / 2) * at.k + at.y - r.y - r.h / 2
  return Math.abs(across) < 2 && Math.abs(down) < 2
}
function overlaps() {
  let count = 0
  root.each(b => {
    const inside = c => b === root || (c.x >= 0 && c.y >= HEAD && c.x + c.w <= b.w + 0.1 && c.y + c.h <= b.h + 0.1)
    b.children.forEach((c, i) => {
      if (!inside(c)) count++
      for (const d of b.children.slice(i + 1))
        if (c.x < d.x + d.w && d.x < c.x + c.w && c.y < d.y + d.h && d.y < c.y + c.h) count++
    })
  })
  return count
}

everything(false)
states.closed = look()
press(block('layer.0 … layer.11'))
states.opened = look()
press(block('layer.0 … layer.11'), at.x + 100 * at.k, at.y + 999 * at.k)
states.inside = look()
press(block('mlp'))
const step = view.querySelector('[data-step="1"]')
press(step)
const headings = [...view.querySelectorAll('.group > .soft')].map(e => e.textContent)
states.step = {layer: [...layerOf.values()], headings}

type('neg_7')
states.hints = [...document.querySelectorAll('#hints li')].slice(0, 2).map(e => e.textContent)
states.many = document.querySelector('#hints .none').textContent
type('/layer.9/mlp/block.4/Neg_37')
key('Enter', search)
const id = view.querySelector('.chosen').closest('[data-id]').dataset.id
const name = panel.querySelector('p code').textContent
states.found = {...look(), name, centred: centred(id), layer: [...layerOf.values()]}
states.lit = view.querySelectorAll('.edge.lit').length

goTo(nodes.findIndex(n => n.name === 'call'))
states.branch = {titles: look().titles, panel: panel.querySelector('h2').textContent}
press(block('Double'))
states.called = look().titles
type('gather')
key('Enter', search)
states.folded = {panel: look().panel, chosen: opOf(chosen.at)}
type('alert(1)')
key('Enter', search)
states.markup = panel.querySelector('p code').textContent

const before = at.k
sheet.dispatchEvent(new WheelEvent('wheel', {deltaY: -300, clientX: 640, clientY: 400, cancelable: true}))
states.zoomed = at.k > before
key('f')
states.fits = root.h * at.k <= innerHeight && root.w * at.k <= innerWidth
const left = at.x
sheet.dispatchEvent(new PointerEvent('pointerdown', {bubbles: true, pointerId: 1, clientX: 100, clientY: 100}))
dispatchEvent(new PointerEvent('pointermove', {bubbles: true, pointerId: 1, clientX: 160, clientY: 100}))
dispatchEvent(new PointerEvent('pointerup', {bubbles: true, pointerId: 1, clientX: 160, clientY: 100}))
states.dragged = at.x - left
key('Escape')
states.escaped = panel.hidden
key('e')
const drawnNodes = new Set(shownBlocks().flatMap(b => b.rows)).size
states.all = {overlaps: overlaps(), nodes: drawnNodes, nan: view.innerHTML.includes('NaN')}
states.requests = performance.getEntriesByType('resource').length
"""
RESULT = """
const result = document.createElement('pre')
result.id = 'result'
result.textContent = JSON.stringify(states)
document.body.append(result)
"""


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a page of 1,300 nodes shows after each step."""
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH to open a page with")
    folder = tmp_path_factory.mktemp("browser")
    page = onnx2jax.convert(network()).draw(folder / "page.html")
    text = page.read_text().replace("'use strict'", f"'use strict'\n{BEFORE}", 1)
    page.write_text(
        text.replace(
            "</script>\n</body>",
            f"try {{{SCRIPT}}} catch (e) {{ states.errors.push(e.stack) }}{RESULT}</script>\n</body>",
        )
    )
    dom = opened(page)
    found = re.search('<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom
    facts: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert facts["errors"] == []
    return facts


def opened(page: Path) -> str:
    """The DOM of a page in a browser."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.stdout or done.stderr[-2000:]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_a_notebook_unpacks_the_page(tmp_path: Path) -> None:
    card = onnx2jax.convert(onnx2jax.demo_model())._repr_html_()
    (frame,) = re.findall("srcdoc='(.*?)'", card)
    (tmp_path / "frame.html").write_text(html.unescape(frame))
    dom = opened(tmp_path / "frame.html")
    assert 'class="block' in dom and "needs a browser" not in dom


def test_layers_alike_are_drawn_once(states: dict[str, Any]) -> None:
    assert states["closed"]["titles"] == [
        "x",
        "go",
        "Reshape",
        "layer.0 … layer.11",
        "If",
        "Relu",
        "Identity",
        "y",
        "again",
    ]
    assert states["closed"]["drawn"] == 9


def test_a_click_opens_a_scope(states: dict[str, Any]) -> None:
    """A click inside shows what it holds; its heading's arrows show another of the layers."""
    assert states["opened"]["titles"][3:6] == ["MatMul, Add", "mlp", "Add"]
    assert (states["opened"]["panel"], states["inside"]["panel"]) == ("", "layer.0 … layer.11 × 12")
    assert states["step"] == {"layer": [1], "headings": ["2 of 12"]}


def test_search_suggests_and_flies_to_a_node(states: dict[str, Any]) -> None:
    """Inside closed scopes, in the fifth block of the tenth layer; the panel has its facts, and its edges are lit."""
    assert states["hints"] == ["Neg/layer.0/mlp/block.0/Neg_7", "Neg/layer.1/mlp/block.0/Neg_7"]
    assert states["many"].endswith("matches")
    assert (states["found"]["name"], states["found"]["panel"]) == ("/layer.9/mlp/block.4/Neg_37", "Neg")
    assert (states["found"]["centred"], states["found"]["layer"]) == (True, [9, 4])
    assert states["lit"] == 2


def test_branches_and_functions_open_inside_their_node(states: dict[str, Any]) -> None:
    assert states["branch"]["panel"] == "Double"
    assert states["branch"]["titles"].count("Double") == 1
    assert {"a", "b", "Add"} <= {*states["called"]}


def test_a_folded_node_is_found_at_its_reader(states: dict[str, Any]) -> None:
    assert states["folded"] == {"panel": "Gather", "chosen": "Reshape"}


def test_names_are_shown_as_they_are(states: dict[str, Any]) -> None:
    assert states["markup"] == NAME


def test_the_view_zooms_fits_and_moves(states: dict[str, Any]) -> None:
    assert states["zoomed"] and states["fits"] and states["escaped"]
    assert states["dragged"] == 60


def test_all_nodes_open_without_overlap(states: dict[str, Any]) -> None:
    """Of layers alike those of one: three and eight of a layer, one before and four after, two of them in branches."""
    assert states["all"] == {"overlaps": 0, "nodes": 3 + 8 + 1 + 4, "nan": False}


def test_the_page_requests_nothing(states: dict[str, Any]) -> None:
    assert states["requests"] == 0

"""Short descriptions of a model, for notebooks and ``repr``."""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Final

from ...ir import analysis
from ...proto.types import TensorType

SHOWN: Final = 8
"""Rows of a table."""
MOST_LETTERS: Final = 2_000_000
"""Of a page in a notebook, whose file keeps it."""
FRAME: Final = "width:100%;height:560px;border:1px solid #8884;border-radius:8px"


def card(model: Any, stages: Sequence[Sequence[str]], page: str) -> str:
    """The page of the graph in a frame; signature, opsets, operators, parameters by size, and stages if several."""
    graph = model.graph
    sorts = {"input": model.inputs, "optional": model.optional.values(), "output": model.outputs}
    values = [(sort, v.name, str(v.type)) for sort, infos in sorts.items() for v in infos]
    operators = Counter(node.op_type for inner in graph.walk() for node in inner.nodes).most_common()
    arrays = sorted(analysis.parameters(graph).items(), key=lambda item: -item[1].nbytes)
    weights = [(n, str(TensorType(v.dtype, v.shape)), f"{v.nbytes:,}") for n, v in arrays]
    total = sum(v.nbytes for _, v in arrays)
    shown = "<p>The graph is too large for a notebook: <code>model.draw('page.html')</code></p>"
    if len(packed := _packed(page)) <= MOST_LETTERS:
        shown = f"<iframe srcdoc='{escape(packed)}' sandbox='allow-scripts' title='graph' style='{FRAME}'></iframe>"
    parts = [
        f"<b>{escape(_title(graph.name))}</b> ({escape(_opsets(model))})",
        shown,
        _table("signature", values),
        _table(f"{sum(n for _, n in operators)} nodes", [(n, str(count)) for n, count in operators]),
        _table(f"{len(arrays)} parameters, {total:,} bytes", weights),
    ]
    if len(stages) > 1:
        parts.append(_table("stages", [row[:3] for row in stages]))
    return f"<div>{''.join(parts)}</div>"


def _packed(page: str) -> str:
    """A page that unpacks another in the browser: of a third to a seventh of the letters."""
    data = base64.b64encode(zlib.compress(page.encode(), 9)).decode()
    return (
        "<!DOCTYPE html><p>The graph needs a browser of 2023 or later.</p><script>"
        f'new Response(new Blob([Uint8Array.from(atob("{data}"), c => c.charCodeAt(0))]).stream()'
        '.pipeThrough(new DecompressionStream("deflate"))).text()'
        ".then(page => { document.open(); document.write(page); document.close() })</script>"
    )


def described(model: Any) -> str:
    """A model in two lines."""
    inputs, outputs = (", ".join(map(str, values)) for values in (model.inputs, model.outputs))
    weights = analysis.parameters(model.graph).values()
    size = f"{len(weights)} parameters, {sum(v.nbytes for v in weights):,} bytes"
    devices = f"; over {model.placement.mesh.size} devices" if model.placement is not None else ""
    stack = f"; a stack of {list(model._stack)} models, for jax.vmap" if model._stack else ""
    return (
        f"{_title(model.graph.name)}: ({inputs}) -> ({outputs})\n"
        f"  {size}; {len(model.graph.nodes)} nodes; {_opsets(model)}{devices}{stack}"
    )


def _title(name: str) -> str:
    """What a model is called: by the name of its graph, which may say itself that it is one.

    >>> _title("digits"), _title("Model from PaddlePaddle.")
    ("Model 'digits'", 'Model from PaddlePaddle')
    """
    words = name.split()
    return " ".join(words).rstrip(".") if len(words) > 1 and words[0] == "Model" else f"Model {name!r}"


def _opsets(model: Any) -> str:
    return ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in model.opsets.items())


def _table(title: str, rows: Sequence[Iterable[str]]) -> str:
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[:SHOWN])
    more = f"<tr><td>{len(rows) - SHOWN} more</td></tr>" if len(rows) > SHOWN else ""
    return f"<details open><summary>{escape(title)}</summary><table>{lines}{more}</table></details>"

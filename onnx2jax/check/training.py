"""Training information: bindings between state variables and the outputs of the training graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..errors import ModelError
from ..graph import Graph
from ..importer import Importer
from ..rules import quoted
from .report import Note


def check_training(model: Any, main: Graph, importer: Importer, note: Note) -> None:
    """Every training_info of a model; ``main`` is its inference graph."""
    visible = (
        {v.name for v in main.inputs} | main.initializers.keys() | {n for node in main.nodes for n in node.outputs}
    )
    sparse = {t.values.name for t in model.graph.sparse_initializer}
    assigned: Counter[str] = Counter()
    for i, info in enumerate(model.training_info):
        where = f"training_info[{i}]"
        for part, outer in (("initialization", set()), ("algorithm", visible)):
            path = f"{where}, {part}"
            graph = importer.graph(getattr(info, part), path, importer.opsets, {})
            with importer.guard(path):
                if unknown := graph.captures - outer:
                    raise ModelError(f"{quoted(unknown)} read or returned but defined nowhere (rules GR-01, GR-14)")
        if info.initialization.input:
            note("TR-05", "error", f"{where}, initialization", "the graph has inputs")
        if info.initialization_binding and not info.HasField("initialization"):
            note("TR-07", "error", where, "there is an initialization_binding, but no initialization")
        variables = {t.name for t in [*model.graph.initializer, *info.algorithm.initializer]}
        for part, graph, more in (
            ("initialization_binding", info.initialization, ()),
            ("update_binding", info.algorithm, [v.name for v in main.outputs]),
        ):
            outputs = {v.name for v in graph.output} | set(more)
            _binding(getattr(info, part), f"{where}, {part}", variables, outputs, sparse, note)
        assigned.update({entry.key for entry in info.update_binding})
    for name in (n for n, times in assigned.items() if times > 1):
        note("TR-09", "error", "training_info", f"{name!r} is assigned by several update bindings")


def _binding(entries: Any, path: str, variables: set[str], outputs: set[str], sparse: set[str], note: Note) -> None:
    keys = Counter(entry.key for entry in entries)
    for name in (n for n, times in keys.items() if times > 1):
        note("TR-09", "error", path, f"{name!r} is assigned twice")
    for entry in entries:
        if entry.key in outputs and entry.value in variables:
            note("TR-08", "error", path, f"{entry.key!r} and {entry.value!r} are the wrong way round")
        elif entry.key in sparse:
            note("TR-29", "error", path, f"{entry.key!r} is a sparse initializer")
        elif entry.key not in variables:
            note("TR-10", "error", path, f"{entry.key!r} is no initializer")
        elif entry.value not in outputs:
            note("TR-11", "error", path, f"{entry.value!r} is no output of the graph")

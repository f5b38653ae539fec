"""The cost of each node for balancing pipeline stages: FLOPs, and bytes of the weights that it reads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ...errors import OnnxError
from ...ir import analysis
from ...ir.graph import Imported
from ...sharding.stages import weights_read
from ..changes.parts import node_outputs, with_graph, with_outputs
from ..reports.summary import feeds_of, mark, traced
from ..spec import Spec


def costs(model_type: Any, imported: Imported) -> list[float]:
    """The cost of each node of the main graph: the mean of its share of FLOPs and its share of weight bytes.

    FLOPs are counted by tracing with free extents of 1; if that fails, only bytes are. The bytes of a weight are its
    first reader's.
    """
    sizes = {n: v.nbytes for n, v in analysis.parameters(imported.graph).items()}
    held = []
    for node in imported.graph.nodes:
        held.append(sum(sizes.pop(n, 0) for n in weights_read(imported.graph, node)))
    shares = [held]
    if flops := _flops(model_type, imported):
        shares.append([flops[i] for i in range(len(held))])
    shares = [s for s in shares if sum(s)] or [[1] * len(held)]
    return [sum(s[i] / sum(s) for s in shares) / len(shares) for i in range(len(held))]


def _flops(model_type: Any, imported: Imported) -> Counter[int] | None:
    model = model_type(Spec.of(imported))
    marked = mark(model.graph)
    try:
        with np.errstate(all="ignore"):
            shown = with_outputs(with_graph(model, marked), node_outputs(marked))
            return traced(shown, None, feeds_of(model, {}, {}, abstract=True), marked.nodes)[1]
    except (OnnxError, TypeError):  # it needs the host, or other extents
        return None

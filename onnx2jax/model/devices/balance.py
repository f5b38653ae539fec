"""What nodes cost, for stages that are alike: their FLOPs and the bytes of the weights that they read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import numpy as np

from ...errors import OnnxError
from ...ir import analysis
from ...ir.graph import Imported
from ...sharding.stages import weights_read
from ..changes.parts import made, remade, showing
from ..model import Model
from ..reports.summary import MARK, feeds_of, traced


def costs(imported: Imported) -> list[float]:
    """For each node of the main graph the mean of its share of the FLOPs and its share of the weights' bytes.

    FLOPs are those of inputs whose free extents are 1, found by tracing; where the model cannot be traced so, the bytes
    alone count. A weight counts where it is read first.
    """
    sizes = {n: v.nbytes for n, v in analysis.parameters(imported.graph).items()}
    held = []
    for node in imported.graph.nodes:
        held.append(sum(sizes.pop(n, 0) for n in weights_read(imported.graph, node)))
    shares = [held]
    if flops := _flops(imported):
        shares.append([flops[i] for i in range(len(held))])
    shares = [s for s in shares if sum(s)] or [[1] * len(held)]
    return [sum(s[i] / sum(s) for s in shares) / len(shares) for i in range(len(held))]


def _flops(imported: Imported) -> Counter[int] | None:
    model = Model(imported)
    nodes = tuple(replace(n, name=f"{MARK}{i}") for i, n in enumerate(model.graph.nodes))
    marked = replace(model.graph, nodes=nodes)
    shapes = {n: jax.ShapeDtypeStruct(t.shape, t.dtype) for n, t in model._types.items()}
    try:
        with np.errstate(all="ignore"):
            shown = showing(remade(model, marked), made(marked))
            return traced(shown, shapes, feeds_of(model, {}, {}), nodes)[1]
    except (OnnxError, TypeError):  # it needs the host, or inputs that 1 for all extents does not fit
        return None

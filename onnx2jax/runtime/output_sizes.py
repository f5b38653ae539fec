"""Outputs that together need more memory than the machine has are refused before a program is compiled.

An array inside a program may be larger, because XLA fuses it into its reader; an output is in memory as it is. Without
the refusal the system ends the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax

from ..errors import OperatorError
from ..ir.graph import Graph
from ..limits import LARGEST_ARRAY


def refuse_outputs_beyond_memory(graph: Graph, results: Iterable[Any]) -> None:
    """Raise OperatorError if results on a CPU take more than LARGEST_ARRAY bytes for each process."""
    sizes = [v.size * v.dtype.itemsize for v in jax.tree.leaves(list(results)) if hasattr(v, "dtype") and _fixed(v)]
    limit = LARGEST_ARRAY * jax.process_count()
    if (needed := sum(sizes)) > limit and jax.default_backend() == "cpu":
        raise OperatorError(
            f"the {len(sizes)} outputs of {graph.name!r} take {needed:.1e} bytes together, and there are {limit:.1e} "
            "bytes of memory: choose smaller extents (--dim name=size, dims={name: size}, or inputs), or "
            "fewer outputs, convert(..., outputs=[...])"
        )


def _fixed(value: Any) -> bool:
    """Whether the extents of an array are numbers, not symbols of ``jax.export``."""
    return isinstance(math.prod(value.shape), int)

"""onnxscript: Python functions read as graphs, with loops, branches, functions of their own and operators of a set."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from .case import Case, Export
from .other_frameworks import LOOP

ONNXSCRIPT: Final = "onnxscript"
SOURCES: Final = Path(__file__).with_name("onnxscript_sources.py")

Operands = Sequence[tuple[str, tuple[int | str, ...]]]
ROWS: Final[Operands] = (("float32", ("N", 4)),)
PAIRS: Final[Operands] = (("float32", ("N", 4)), ("float32", ("N", 4)))
COUNTED: Final[Operands] = (("float32", ("N", 4)), ("int64", ()))
FUNCTIONS: Final[dict[str, Operands]] = {
    "arithmetic": PAIRS,
    "comparisons": PAIRS,
    "powers": ROWS,
    "slices": ROWS,
    "negative_steps": ROWS,
    "branch": ROWS,
    "branches_without_else_value": ROWS,
    "for_loop": ROWS,
    "for_loop_of_a_count": COUNTED,
    "while_loop": ROWS,
    "loop_with_break": COUNTED,
    "loop_in_loop": ROWS,
    "calls": ROWS,
    "attribute_of_a_call": ROWS,
    "gelu_by_hand": ROWS,
    "layer_norm_by_hand": ROWS,
    "attention_by_hand": ROWS,
    "scan_with_a_graph": ROWS,
    "casts": ROWS,
    "two_outputs": ROWS,
    "shape_arithmetic": ROWS,
    "optional_sequence": ROWS,
    "clipped": ROWS,
    "logical": PAIRS,
    "matrices": ROWS,
}


@cache
def _functions() -> Any:
    from . import onnxscript_sources

    return onnxscript_sources


def _export(name: str, operands: Operands, folder: Path) -> Export:
    import onnx
    from onnx import helper

    model = getattr(_functions(), name).to_model_proto()
    for value, (dtype, shape) in zip(model.graph.input, operands, strict=True):
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        value.type.CopyFrom(helper.make_tensor_type_proto(kind, shape))
    onnx.save(model, folder / "model.onnx")
    rng = np.random.default_rng(0)
    inputs = [
        {
            v.name: np.asarray(rows + 1) if d == "int64" else rng.standard_normal((rows, 4)).astype(np.float32)
            for v, (d, _) in zip(model.graph.input, operands, strict=True)
        }
        for rows in (2, 3)
    ]
    return Export(folder / "model.onnx", inputs)


KNOWN: Final[dict[str, dict[str, str]]] = {
    name: {"grad": LOOP} for name in ("while_loop", "for_loop_of_a_count", "loop_with_break")
}
REFUSED: Final = {"x[-1, 2] / onnxscript": "writes a Slice from -1 to 0, which is empty"}
CASES: Final = tuple(
    Case(
        "onnxscript",
        name.replace("_", " "),
        ONNXSCRIPT,
        partial(_export, name, operands),
        ("onnxscript",),
        known=KNOWN.get(name, {}),
    )
    for name, operands in FUNCTIONS.items()
)

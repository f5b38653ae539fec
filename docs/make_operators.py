"""Write docs/operators.md: each supported operator, in which types, where it runs, its gradient, its limits.

python -m docs.make_operators
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import onnx

import onnx2jax
from onnx2jax.ir import binding
from onnx2jax.ops import extensions, qonnx, registry
from onnx2jax.ops.registry import PADDED, Operator
from tests.ops.test_branches import folds, without_a_case
from tests.ops.test_gradients import TABLE, WITHOUT, gradient_rows
from tests.ops.test_microsoft_types import FAMILIES
from tests.tables.folding import CASES
from tests.tables.operators import HOST_ONLY, TYPES_LEFT_OUT

PAGE = Path(__file__).with_name("operators.md")
Schema = onnx.defs.OpSchema

_GROUPS = {
    "float": ("float16", "bfloat16", "float", "double"),
    "int": ("int8", "int16", "int32", "int64"),
    "uint": ("uint8", "uint16", "uint32", "uint64"),
    "complex": ("complex64", "complex128"),
    "float8": ("float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"),
    "float6": ("float6e2m3", "float6e3m2"),
    "int2/4": ("int2", "uint2", "int4", "uint4"),
}
_FLOATS = frozenset(_GROUPS["float"])

ALSO_CHECKED = {
    ("", "If"): "tests/ops/test_control.py",
    ("", "Loop"): "tests/ops/test_control.py",
    ("", "Scan"): "tests/ops/test_control.py",
    ("ai.onnx.ml", "Normalizer"): "tests/ops/test_ml.py",
    ("ai.onnx.preview.training", "Adagrad"): "tests/ops/test_preview_training.py",
    ("com.microsoft", "CDist"): "tests/ops/test_microsoft.py",
    **{(qonnx.DOMAINS[0], name): "tests/ops/test_qonnx.py" for name in sorted(qonnx.ROUNDED)},
    **{
        ("com.microsoft", name): f"tests/ops/{file.__name__.rpartition('.')[2]}.py"
        for file in FAMILIES
        for name in file.DIFFERENTIABLE
    },
}
"""Operators outside the table of tests/ops/test_gradients.py whose gradient another file tests."""

_FLAT = frozenset(
    {
        *(("", n) for n in ("Ceil", "Floor", "Round", "Sign", "BitCast", "EyeLike")),
        *(("", n) for n in ("Bernoulli", "RandomNormalLike", "RandomUniformLike")),
        *((d, n) for d in ("", "com.microsoft") for n in ("QuantizeLinear", "DynamicQuantizeLinear", "MulInteger")),
        *(("ai.onnx.ml", n) for n in ("Binarizer", "LabelEncoder", "OneHotEncoder", "TreeEnsemble")),
        *(("ai.onnx.ml", n) for n in ("TreeEnsembleClassifier", "TreeEnsembleRegressor")),
    }
)
"""Operators whose floating results do not move with their inputs."""

_ORDERED = "int8 matrices tiled as cublasLt wants them on one kind of GPU; the schema defines the tilings by a link"
_VENDOR = "a blob that one vendor's compiler made, without the operators it came from"
_BLOCKS = "block floating point, whose kinds (bfp_type) and bytes the schema does not define"
_FORMATS = (
    "weights in blocks whose bytes the schema defines by a link alone; use MatMulNBits, GatherBlockQuantized, QMoE"
)
_SELECTING = (
    "onnxruntime's CPU provider has no kernel to compare with, and of selections with weights, masks or a cache beside "
    "the main one the schema leaves open which entries a query sees"
)
MISSING = {
    "BifurcationDetector": "the schema and onnxruntime's kernel differ in the index returned: start and end of a match",
    "DequantizeBFP": _BLOCKS,
    "DequantizeWithOrder": _ORDERED,
    "EPContext": _VENDOR,
    "GatherPacked": _FORMATS,
    "MatMulFpQ4": "a blob of weights in the order of the processor that onnxruntime packed it on; use MatMulNBits",
    "MatMulPacked": _FORMATS,
    "MaxpoolWithMask": "for internal use, says the schema, and not what the mask does",
    "MoEPacked": _FORMATS,
    "QOrderedAttention": _ORDERED,
    "QOrderedGelu": _ORDERED,
    "QOrderedLayerNormalization": _ORDERED,
    "QOrderedLongformerAttention": _ORDERED,
    "QOrderedMatMul": _ORDERED,
    "QuantizeBFP": _BLOCKS,
    "QuantizeWithOrder": _ORDERED,
    "Snpe": _VENDOR,
    "SparseToDenseMatMul": "takes a sparse tensor, which is dense here as soon as it is read: use MatMul",
    "SpeculativePrefixCommit": "writes records to an address in memory, which no function of arrays can",
    "WordConvEmbedding": "the schema names neither the activation nor how long a word is",
    "Mamba2Verify": "for one GPU runtime, with heads of 64 and states of 128 alone; no CPU kernel to compare with",
    **dict.fromkeys(["PackedSparseAttentionIndexer", "SparseAttentionIndexer", "SparsePagedAttention"], _SELECTING),
}
"""Operators of com.microsoft in onnxruntime's schemas that are unsupported, with the reason."""

INTRODUCTION = """\
<!-- Written by `make docs`; tests/ops/test_operator_docs.py holds it to the code. -->

# Operators

Supported operators, generated from the registry, ONNX's schemas ({onnx}) and the test tables.

- **Since**: opsets at which the *semantics* change; the newest one not above the model's opset applies.
  **Versions**: versions of the schema, all supported; (-) marks a version in which the operator is deprecated.
- **Types**: element types that the newest schema allows for the operator's tensors, except unsupported ones. `float` is
  float16, bfloat16, float32 and float64; `int` int8 to int64; `uint` uint8 to uint64; `float8` the four kinds except
  e8m0; `int2/4` int2, uint2, int4 and uint4. `tests/ops/test_element_types.py` runs the operators of ai.onnx in each of
  them, on the host and compiled. On the host only: {host_only}.
- **Runs**: `jit`: compiled into one program with its neighbours. Inputs listed there must be known before compiling
  (constants, shapes, and values computed from them); calls of a model find such values automatically. `host`: in NumPy,
  because every input must be known. `jit, folds`: also in NumPy if all inputs are known (constant folding).
- **Gradient**: `checked`: against central differences in float64 (`tests/ops/test_gradients.py`) or in the tests of
  its family; `by JAX`: JAX's rules, without a test of its own; `none`: nothing to differentiate, or zero everywhere.
- **Limits**: unsupported cases, all of which raise, and choices where ONNX leaves some.
"""

_MICROSOFT_TYPES = """\

ONNX defines no schemas for this domain. `tests/ops/test_microsoft_types.py` runs the operators in each type that
onnxruntime's schemas allow. Unsupported operators of onnxruntime's schemas:

{missing}
"""

_WITHOUT_TYPES = ("com.microsoft", extensions.DOMAINS[0])
_EXTENSIONS = """\

Operators of the package onnxruntime-extensions, also under its second domain, `com.microsoft.extensions`.
`tests/ops/test_extensions.py` compares them with its library if it is installed. Unsupported, with alternatives:

{missing}
"""


def history() -> dict[tuple[str, str], list[Schema]]:
    """All versions of ONNX's schemas by (domain, operator), oldest first."""
    found = defaultdict(list)
    for schema in sorted(onnx.defs.get_all_schemas_with_history(), key=lambda s: s.since_version):
        found[schema.domain, schema.name].append(schema)
    return dict(found)


def allowed(schema: Schema, formals: list[Schema.FormalParameter]) -> dict[str, list[str]]:
    """Type variable (or the parameter's own name) -> the element types of tensors that the schema allows."""
    constraints = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    left_out = TYPES_LEFT_OUT.get((schema.domain, schema.name), ())
    found = {}
    for formal in formals:
        types = constraints.get(formal.type_str, [formal.type_str])
        inner = [t.replace("seq(", "").replace("optional(", "").rstrip(")") for t in types]
        names = dict.fromkeys(t.removeprefix("tensor(") for t in inner if t.startswith("tensor("))
        found[formal.type_str if formal.type_str in constraints else formal.name] = [
            n for n in names if n not in left_out
        ]
    return found


def _grouped(names: list[str]) -> str:
    groups = []
    rest = list(names)
    for group, members in _GROUPS.items():
        if set(members) <= set(rest):
            groups.append(group)
            rest = [n for n in rest if n not in members]
    short = {"float": "float32", "double": "float64"}
    return " ".join([*groups, *(short.get(n, n) for n in rest)])


def _types(schema: Schema) -> str:
    by_variable = allowed(schema, list(schema.inputs) or list(schema.outputs))
    texts = {variable: _grouped(names) or "maps" for variable, names in by_variable.items()}
    shown = dict.fromkeys(texts.values())
    if len(shown) == 1:
        return next(iter(shown))
    return "; ".join(f"{variable}: {text}" for variable, text in texts.items())


def _runs(operator: Operator, folds: bool) -> str:
    parameters = inspect.signature(operator.function).parameters if operator.function else {}
    inputs = [p for p in operator.inputs if p in parameters]
    static = [p for p in inputs if p in operator.static]
    if inputs and all(p in operator.static for p in inputs):
        return "host"
    return f"jit{', folds' if folds else ''}" + (f"; known: {', '.join(static)}" if static else "")


def _gradient(operator: Operator, schema: Schema | None) -> str:
    key = operator.domain, operator.name
    if key in checked():
        return "checked"
    if _runs(operator, folds=False) == "host" or key in _FLAT or operator.name.startswith("QLinear"):
        return "none"
    if schema is not None:
        used = [list(f.items()) for f in (allowed(schema, list(s)) for s in (schema.inputs, schema.outputs))]
        if not all(any(_FLOATS & set(names) for _, names in side) for side in used):
            return "none"
    return "by JAX"


def _cells(domain: str, name: str, since: tuple[int, ...], schemas: list[Schema]) -> Iterator[str]:
    operators = [registry.resolve(domain, name, s) for s in since]
    newest = [o for o in operators if o is not None and o.function is not None][-1]
    living = [s for s in schemas if not s.deprecated]
    yield f"`{name}`"
    yield ", ".join(map(str, since))
    yield ", ".join(f"({s.since_version})" if s.deprecated else str(s.since_version) for s in schemas) or "-"
    if domain not in _WITHOUT_TYPES:
        yield _types(living[-1]) if living else "float"
    yield _runs(newest, (domain, name) in folding())
    yield _gradient(newest, living[-1] if living else None)
    yield newest.limits


@functools.cache
def checked() -> frozenset[tuple[str, str]]:
    """The operators whose gradient a test compares with differences."""
    from_rows = {row.key for row in gradient_rows()} - WITHOUT.keys() - _FLAT
    return frozenset({*ALSO_CHECKED, *(("", name) for name, *_ in TABLE), *from_rows})


@functools.cache
def folding() -> frozenset[tuple[str, str]]:
    """The operators that give NumPy for NumPy, which tests/ops/test_branches.py tries one by one."""
    return frozenset(CASES) | {row.key for row in without_a_case() if folds(row)}


def own() -> dict[str, dict[str, tuple[int, ...]]]:
    """The package's own operators; a user of the same process may have added others."""
    domains = (*binding.NEWEST, "com.microsoft", qonnx.DOMAINS[0], extensions.DOMAINS[0], PADDED)
    return {domain: onnx2jax.supported()[domain] for domain in domains}


def _missing(supported: Collection[str], missing: Mapping[str, str]) -> str:
    """A list of the unsupported operators, by reason."""
    reasons = defaultdict(list)
    for name, why in sorted(missing.items()):
        if name not in supported:
            reasons[why].append(f"`{name}`")
    return "\n".join(f"- {', '.join(names)}: {why}" for why, names in reasons.items())


def page() -> str:
    """The whole of docs/operators.md."""
    schemas = history()
    host_only = "; ".join(f"{name} ({why})" for name, why in HOST_ONLY.items())
    parts = [INTRODUCTION.format(onnx=f"onnx {onnx.__version__}", host_only=host_only)]
    for domain, operators in own().items():
        head = ["Operator", "Since", "Versions", "Types", "Runs", "Gradient", "Limits"]
        parts.append(f"\n## {domain or 'ai.onnx'}\n\n{len(operators)} operators.\n")
        if domain == "com.microsoft":
            parts.append(_MICROSOFT_TYPES.format(missing=_missing(operators, MISSING)))
        if domain == extensions.DOMAINS[0]:
            parts.append(_EXTENSIONS.format(missing=_missing(operators, extensions.REPLACEMENTS)))
        kind = "operators"  # docs/site.css shows rows as cards on a phone, with the columns' names
        if domain in _WITHOUT_TYPES:
            head.remove("Types")
            kind = "operators untyped"
        rows = [list(_cells(domain, name, since, schemas.get((domain, name), []))) for name, since in operators.items()]
        lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
        parts.append(f'\n<div class="{kind}" markdown="1">\n\n' + "\n".join(lines) + "\n\n</div>\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")

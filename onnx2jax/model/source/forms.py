"""Plain forms: operators that are one expression of Python, jax.numpy or jax.nn. Arithmetic and activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...ir.graph import Node
from .values import HALF, Value, array, dtype_name, extent, is_inline, number, tuple_of


@dataclass(frozen=True, eq=False)
class NodeCall:
    """A node with its operands.

    Attributes:
        node: the node.
        attributes: its attributes, without graphs.
        operands: its inputs, None for one that is left out.
        results: its outputs, whose text is empty; their types are as far as they are known.
        constant: the text of a constant that is too large for the text.
    """

    node: Node
    attributes: Mapping[str, Any]
    operands: tuple[Value | None, ...]
    results: tuple[Value, ...]
    constant: Callable[[Value], str]

    def __len__(self) -> int:
        return len(self.operands)

    def value(self, i: int) -> Value:
        """An operand; an unknown value where it is left out."""
        found = self.operands[i] if i < len(self.operands) else None
        return found or Value()

    def has(self, i: int) -> bool:
        """Whether an operand is given."""
        return i < len(self.operands) and self.operands[i] is not None

    def text(self, i: int) -> str:
        """An operand as an array."""
        return self.array(self.value(i))

    def array(self, value: Value) -> str:
        """A value as an array."""
        if value.known is None:
            return value.text
        if value.is_extents:
            return f"np.array({self.sequence(value)})"
        return array(value.known) if is_inline(value.known) else self.constant(value)

    def sequence(self, value: Value) -> str:
        """Integers or extents as a Python number or tuple."""
        assert value.known is not None
        if value.known.ndim == 0:
            return extent(value.known.item())
        return tuple_of([extent(d) for d in value.known.reshape(-1).tolist()])

    def ints(self, i: int) -> tuple[int, ...] | None:
        """The elements of an integer operand; None where they are unknown or symbolic."""
        known = self.value(i).known
        if known is None or known.dtype == object or known.dtype.kind not in "iu":
            return None
        return tuple(known.reshape(-1).tolist())

    def scalar(self, i: int) -> Any:
        """The single element of a constant operand; None where there is none."""
        known = self.value(i).known
        return known.reshape(())[()] if known is not None and known.size == 1 and known.dtype != object else None

    def infix(self, i: int, other: int) -> str:
        """An operand beside another one, as a Python number where that gives the same array."""
        value, beside = self.value(i), self.value(other)
        if value.is_extents and value.rank == 0 and beside.rank is not None and beside.known is None:
            text = extent(value.known.item())  # type: ignore[union-attr]
            return text if text.isidentifier() or "\x02" not in text else f"({text})" if " " in text else text
        single = self.scalar(i)
        weak = beside.known is None and not beside.host and value.dtype == beside.dtype
        if single is not None and weak and None not in (value.rank, beside.rank) and value.rank <= beside.rank:  # type: ignore[operator]
            return number(single)
        return self.text(i)

    @property
    def is_half(self) -> bool:
        """Whether an operand or a result is of half precision."""
        return any(v is not None and v.dtype in HALF for v in (*self.operands, *self.results))

    @property
    def is_float(self) -> bool:
        """Whether the first operand is of float32 or float64."""
        dtype = self.value(0).dtype
        return dtype is not None and dtype.kind == "f" and dtype not in HALF

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)


Form = Callable[[NodeCall], str | None]
"""The expression of a node; None where this node has no plain form."""

UNARY: Final = {
    "Abs": "jnp.abs({})",
    "Acos": "jnp.arccos({})",
    "Asin": "jnp.arcsin({})",
    "Atan": "jnp.arctan({})",
    "BitwiseNot": "~{}",
    "Ceil": "jnp.ceil({})",
    "Cos": "jnp.cos({})",
    "Cosh": "jnp.cosh({})",
    "Elu": "nn.elu({})",
    "Erf": "lax.erf({})",
    "Exp": "jnp.exp({})",
    "Floor": "jnp.floor({})",
    "IsNaN": "jnp.isnan({})",
    "Log": "jnp.log({})",
    "Mish": "nn.mish({})",
    "Neg": "-{}",
    "Not": "~{}",
    "Reciprocal": "1 / {}",
    "Relu": "nn.relu({})",
    "Round": "jnp.round({})",
    "Sigmoid": "nn.sigmoid({})",
    "Sign": "jnp.sign({})",
    "Sin": "jnp.sin({})",
    "Sinh": "jnp.sinh({})",
    "Softplus": "nn.softplus({})",
    "Softsign": "nn.soft_sign({})",
    "Sqrt": "jnp.sqrt({})",
    "Swish": "nn.silu({})",
    "Tan": "jnp.tan({})",
    "Tanh": "jnp.tanh({})",
}
HALF_AS_ONE: Final = {"Sigmoid", "Softplus", "Softsign"}
"""Operators that compute half precision in float32, and round once."""
FLOATS: Final = {"Elu", "Erf", "Mish", "Swish"}
"""Operators that have a plain form in float32 and float64 alone."""
BINARY: Final = {
    "Add": "+",
    "And": "&",
    "BitwiseAnd": "&",
    "BitwiseOr": "|",
    "BitwiseXor": "^",
    "Equal": "==",
    "Greater": ">",
    "GreaterOrEqual": ">=",
    "Less": "<",
    "LessOrEqual": "<=",
    "Mul": "*",
    "Or": "|",
    "Sub": "-",
    "Xor": "^",
}


def unary(call: NodeCall) -> str | None:
    op = call.node.op_type
    if (
        (op in HALF_AS_ONE and call.is_half)
        or (op in FLOATS and not call.is_float)
        or call.attribute("alpha", 1.0) != 1
    ):
        return None
    return UNARY[op].format(call.text(0))


def binary(call: NodeCall) -> str | None:
    if call.node.opset < 7 and not _same_rank(call):
        return None  # B is aligned by an attribute
    return f"{call.infix(0, 1)} {BINARY[call.node.op_type]} {call.infix(1, 0)}"


def _same_rank(call: NodeCall) -> bool:
    a, b = call.value(0), call.value(1)
    return a.shape is not None and (a.shape == b.shape or (call.scalar(1) is not None and a.rank is not None))


def div(call: NodeCall) -> str | None:
    dtypes = [call.value(i).dtype for i in range(2)]
    if any(d is None or d.kind != "f" for d in dtypes) or (call.node.opset < 7 and not _same_rank(call)):
        return None
    return f"{call.infix(0, 1)} / {call.infix(1, 0)}"


def power(call: NodeCall) -> str | None:
    exponent = call.scalar(1)
    if exponent is None or not call.value(0).is_floating or call.value(1).rank or call.node.opset < 7:
        single = exponent is not None and call.value(1).rank is not None and call.value(0).rank is not None
        if not single or call.value(1).rank > call.value(0).rank or not call.value(0).is_floating:  # type: ignore[operator]
            return None
    return f"{call.text(0)}**{int(exponent)}" if exponent == int(exponent) and 1 <= exponent <= 16 else None


def variadic(symbol: str) -> Form:
    def form(call: NodeCall) -> str | None:
        if symbol == "+":
            return " + ".join(call.infix(i, 1 - min(i, 1)) for i in range(len(call)))
        if len(call) == 1:
            return None
        text = f"{symbol}({call.infix(0, 1)}, {call.infix(1, 0)})"
        return text if len(call) == 2 else None

    return form


def where(call: NodeCall) -> str:
    return f"jnp.where({call.text(0)}, {call.infix(1, 2)}, {call.infix(2, 1)})"


def leaky_relu(call: NodeCall) -> str | None:
    alpha = call.attribute("alpha", 0.009999999776482582)
    return f"nn.leaky_relu({call.text(0)}, {number(np.float32(alpha))})" if call.is_float else None


def selu(call: NodeCall) -> str | None:
    plain = call.is_float and call.node.opset >= 6 and not call.attributes and call.value(0).dtype == np.float32
    return f"nn.selu({call.text(0)})" if plain else None


def p_relu(call: NodeCall) -> str | None:
    x = call.text(0)
    fits = call.is_float and call.node.opset >= 7
    return f"jnp.where({x} < 0, {call.text(1)} * {x}, {x})" if fits else None


def gelu(call: NodeCall) -> str | None:
    if not call.is_float:
        return None
    approximate = call.attribute("approximate", "none") in ("tanh", b"tanh")
    return f"nn.gelu({call.text(0)}, approximate={approximate})"


def softmax(name: str) -> Form:
    def form(call: NodeCall) -> str | None:
        axis, rank = call.attribute("axis", -1 if call.node.opset >= 13 else 1), call.value(0).rank
        along = call.node.opset >= 13 or (rank is not None and axis % rank == rank - 1)
        if not call.is_float or not along or rank == 0:
            return None
        axis = -1 if rank is not None and axis % rank == rank - 1 else axis
        return f"nn.{name}({call.text(0)}, axis={axis})"

    return form


def cast(call: NodeCall) -> str | None:
    source, target = call.value(0).dtype, call.results[0].dtype
    if source is None or target is None or any(d.kind not in "biuf" for d in (source, target)):
        return None
    if source.kind == "f" and target.kind in "iu":
        return None
    return f"{call.text(0)}.astype({dtype_name(target)})"


def matmul(call: NodeCall) -> str | None:
    if call.is_half or not call.value(0).is_floating:
        return None
    return f"{call.text(0)} @ {call.text(1)}"


def gemm(call: NodeCall) -> str | None:
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if call.is_half or not call.value(0).is_floating or call.node.opset < 7:
        return None
    a, b = (f"{call.text(i)}.T" if call.attribute(f"trans{'AB'[i]}", 0) else call.text(i) for i in range(2))
    product = f"{a} @ {b}" if alpha == 1 else f"{number(np.float32(alpha))} * ({a} @ {b})"
    if not call.has(2) or beta == 0:
        return product
    c = call.text(2) if beta == 1 else f"{number(np.float32(beta))} * {call.text(2)}"
    return f"{product} + {c}"


def einsum(call: NodeCall) -> str | None:
    equation = call.attribute("equation")
    equation = equation.decode() if isinstance(equation, bytes) else equation
    if call.is_half or not call.value(0).is_floating:
        return None
    return f'jnp.einsum("{equation}", {", ".join(call.text(i) for i in range(len(call)))})'


REDUCTIONS: Final = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")


def reduction(call: NodeCall) -> str | None:
    dtype, name = call.value(0).dtype, call.node.op_type.removeprefix("Reduce").lower()
    integers = dtype is not None and dtype.kind in "iu" and name in ("sum", "max", "min")
    if not (call.is_float or integers):
        return None
    axes = call.ints(1) if call.has(1) else call.attribute("axes")
    if call.has(1) and axes is None:
        return None
    keep = call.attribute("keepdims", 1)
    if axes is None or not len(axes):
        if call.attribute("noop_with_empty_axes", 0):
            return None
        axes = ()
    axis = "" if not len(axes) else f"axis={axes[0]}" if len(axes) == 1 else f"axis={tuple_of(list(map(str, axes)))}"
    kind = f"dtype={dtype_name(dtype)}" if integers and name == "sum" and dtype is not None else ""
    options = ", ".join(filter(None, (axis, kind, "keepdims=True" if keep else "")))
    return f"{call.text(0)}.{name}({options})"


def arg_extremum(call: NodeCall) -> str | None:
    if not call.is_float or call.attribute("select_last_index", 0):
        return None
    name, axis, rank = call.node.op_type.lower(), call.attribute("axis", 0), call.value(0).rank
    if rank is None or call.attribute("keepdims", 1):
        return None
    # By 32 bits, because the caller's jit may lack 64.
    return f"lax.{name}({call.text(0)}, {axis % rank}, jnp.int32).astype(jnp.int64)"


def cum_sum(call: NodeCall) -> str | None:
    axis = call.scalar(1)
    if not call.is_float or axis is None or call.attribute("exclusive", 0) or call.attribute("reverse", 0):
        return None
    return f"jnp.cumsum({call.text(0)}, axis={int(axis)})"


ARITHMETIC: Final[dict[str, Form]] = {
    **dict.fromkeys(UNARY, unary),
    **dict.fromkeys(BINARY, binary),
    **dict.fromkeys(REDUCTIONS, reduction),
    "ArgMax": arg_extremum,
    "ArgMin": arg_extremum,
    "Cast": cast,
    "CastLike": cast,
    "CumSum": cum_sum,
    "Div": div,
    "Einsum": einsum,
    "Gelu": gelu,
    "Gemm": gemm,
    "LeakyRelu": leaky_relu,
    "LogSoftmax": softmax("log_softmax"),
    "MatMul": matmul,
    "Max": variadic("jnp.maximum"),
    "Min": variadic("jnp.minimum"),
    "PRelu": p_relu,
    "Pow": power,
    "Selu": selu,
    "Softmax": softmax("softmax"),
    "Sum": variadic("+"),
    "Where": where,
}
"""Operators of ai.onnx with plain forms."""

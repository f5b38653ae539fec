"""Plain forms: operators that are one expression of Python, jax.numpy or jax.nn. Arithmetic and activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...ir.graph import Node
from .values import HALF, Value, dtype_name, extent, number, packed


@dataclass(frozen=True, eq=False)
class NodeCall:
    """A node with its operands.

    Attributes:
        node: the node.
        attributes: its attributes, without graphs.
        operands: its inputs, None for one that is left out.
        results: its outputs, whose text is empty; their types are as far as they are known.
        array: the text of a value as an array.
    """

    node: Node
    attributes: Mapping[str, Any]
    operands: tuple[Value | None, ...]
    results: tuple[Value, ...]
    array: Callable[[Value], str]

    def __len__(self) -> int:
        return len(self.operands)

    def value(self, i: int) -> Value:
        """An operand; an unknown value where it is left out."""
        return (self.operands[i] if i < len(self.operands) else None) or Value()

    def has(self, i: int) -> bool:
        """Whether an operand is given."""
        return i < len(self.operands) and self.operands[i] is not None

    def text(self, i: int) -> str:
        """An operand as an array."""
        return self.array(self.value(i))

    def ints(self, i: int) -> tuple[int, ...] | None:
        """The elements of an integer operand; None where they are unknown or symbolic."""
        known = self.value(i).known
        if known is None or known.dtype == object or known.dtype.kind not in "iu":
            return None
        return tuple(known.reshape(-1).tolist())

    def integers(self, name: str, i: int) -> tuple[int, ...] | None:
        """Integers that are an operand or, in old opsets, an attribute; None where they are unknown or left out."""
        attribute = self.attribute(name)
        return self.ints(i) if self.has(i) or attribute is None else tuple(np.ravel(attribute).tolist())

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
    def is_host(self) -> bool:
        """Whether it computes with extents and constants alone."""
        return all(v is None or v.host for v in self.operands) or self.node.op_type in ("Shape", "Size")

    @property
    def is_float(self) -> bool:
        """Whether the first operand is of float32 or float64."""
        return self.value(0).is_floating and self.value(0).dtype not in HALF

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)


Form = Callable[[NodeCall], str | None]
"""The expression of a node; None where this node has no plain form."""

_NAMESAKES: Final = {
    "jnp": "Abs Ceil Cos Cosh Exp Floor IsNaN Log Round Sign Sin Sinh Sqrt Tan Tanh",
    "nn": "Elu Mish Relu Sigmoid Softplus",
}
"""Operators of one operand that JAX has under the same name, by module."""
UNARY: Final = {
    **{name: f"{module}.{name.lower()}({{}})" for module, names in _NAMESAKES.items() for name in names.split()},
    "Acos": "jnp.arccos({})",
    "Asin": "jnp.arcsin({})",
    "Atan": "jnp.arctan({})",
    "BitwiseNot": "~{}",
    "Erf": "lax.erf({})",
    "Neg": "-{}",
    "Not": "~{}",
    "Reciprocal": "1 / {}",
    "Softsign": "nn.soft_sign({})",
    "Swish": "nn.silu({})",
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
    "Div": "/",
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
    a, b, symbol = call.value(0), call.value(1), BINARY[call.node.op_type]
    if symbol == "/" and not (a.is_floating and b.is_floating):
        return None
    if call.node.opset < 7 and (a.shape is None or (a.shape != b.shape and call.scalar(1) is None)):
        return None  # B is aligned by an attribute
    return f"{call.infix(0, 1)} {symbol} {call.infix(1, 0)}"


def power(call: NodeCall) -> str | None:
    base, exponent, rank = call.value(0), call.scalar(1), call.value(1).rank or 0
    keeps_shape = (rank == 0 and call.node.opset >= 7) or (base.rank is not None and rank <= base.rank)
    if not keeps_shape or not base.is_floating or exponent not in range(1, 17):
        return None
    return f"{call.text(0)}**{int(exponent)}"


def sum_(call: NodeCall) -> str:
    return " + ".join(call.infix(i, 1 - min(i, 1)) for i in range(len(call)))


def extremum(call: NodeCall) -> str | None:
    name = {"Max": "maximum", "Min": "minimum"}[call.node.op_type]
    return f"jnp.{name}({call.infix(0, 1)}, {call.infix(1, 0)})" if len(call) == 2 else None


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
    return f"nn.gelu({call.text(0)}, approximate={call.attribute('approximate') == 'tanh'})"


def softmax(call: NodeCall) -> str | None:
    axis, rank = call.attribute("axis", -1 if call.node.opset >= 13 else 1), call.value(0).rank
    is_last = axis in (-1, (rank or 0) - 1)
    if not call.is_float or rank == 0 or (call.node.opset < 13 and not is_last):
        return None
    name = {"LogSoftmax": "log_softmax", "Softmax": "softmax"}[call.node.op_type]
    return f"nn.{name}({call.text(0)}, axis={-1 if is_last else axis})"


def cast(call: NodeCall) -> str | None:
    source, target = call.value(0).dtype, call.results[0].dtype
    if source is None or target is None or any(d.kind not in "biuf" for d in (source, target)):
        return None
    if source.kind == "f" and target.kind in "iu":
        return None
    return f"{call.text(0)}.astype({dtype_name(target)})"


def matmul(call: NodeCall) -> str | None:
    return f"{call.text(0)} @ {call.text(1)}" if call.is_float else None


def gemm(call: NodeCall) -> str | None:
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if not call.is_float or call.node.opset < 7:
        return None
    a, b = (f"{call.text(i)}.T" if call.attribute(f"trans{'AB'[i]}", 0) else call.text(i) for i in range(2))
    product = f"{a} @ {b}" if alpha == 1 else f"{number(np.float32(alpha))} * ({a} @ {b})"
    if not call.has(2) or beta == 0:
        return product
    c = call.text(2) if beta == 1 else f"{number(np.float32(beta))} * {call.text(2)}"
    return f"{product} + {c}"


def einsum(call: NodeCall) -> str | None:
    operands = ", ".join(call.text(i) for i in range(len(call)))
    return f'jnp.einsum("{call.attribute("equation")}", {operands})' if call.is_float else None


REDUCTIONS: Final = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd")


def reduction(call: NodeCall) -> str | None:
    dtype, name = call.value(0).dtype, call.node.op_type.removeprefix("Reduce").lower()
    integers = dtype is not None and dtype.kind in "iu" and name in ("sum", "max", "min")
    if not (call.is_float or integers):
        return None
    axes = call.integers("axes", 1)
    if (call.has(1) and axes is None) or (not axes and call.attribute("noop_with_empty_axes", 0)):
        return None
    options = [f"axis={packed(axes)}"] if axes else []
    options += [f"dtype={dtype_name(dtype)}"] if integers and name == "sum" and dtype is not None else []
    options += ["keepdims=True"] if call.attribute("keepdims", 1) else []
    return f"{call.text(0)}.{name}({', '.join(options)})"


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
    **dict.fromkeys(("ArgMax", "ArgMin"), arg_extremum),
    **dict.fromkeys(("Cast", "CastLike"), cast),
    **dict.fromkeys(("LogSoftmax", "Softmax"), softmax),
    **dict.fromkeys(("Max", "Min"), extremum),
    "CumSum": cum_sum,
    "Einsum": einsum,
    "Gelu": gelu,
    "Gemm": gemm,
    "LeakyRelu": leaky_relu,
    "MatMul": matmul,
    "PRelu": p_relu,
    "Pow": power,
    "Selu": selu,
    "Sum": sum_,
    "Where": where,
}
"""Operators of ai.onnx with plain forms."""

"""What is computed of bytes one by one is known for all 256: maxima come before it, and what changes nothing goes.

Before, MaxPool between DequantizeLinear and QuantizeLinear of the same scale and zero point; x is uint8:

    a = convert_element_type[int32] x;  b = sub a 3;  c = convert_element_type[float32] b;  d = mul c 0.1
    e:f32 = reduce_window_max d
    f = div e 0.1;  g = round f;  h = add g 3.0;  i = min h 255.0;  y:u8 = convert_element_type[uint8] i

After:

    y:u8 = reduce_window_max x

Of each byte, d follows by a table, which NumPy computes from 0 to 255. It never decreases, so the largest d is that of
the largest x. What follows from x by a table that is 0 to 255 again is x. The numbers stay the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jax.extend.core import Literal, Var

from .inline import variables
from .on_numpy import ELEMENTWISE, RULES, is_computable

BYTES: Final = (np.dtype(np.int8), np.dtype(np.uint8))


@dataclass(frozen=True)
class Mapped:
    """An array whose elements follow from bytes, one by one.

    Attributes:
        source: the variable of the bytes; None where all elements are the same.
        table: what follows from each byte, from the lowest; or that same number.
        like: a variable that is computed by this table of bytes of its own, element by element.
        holes: where elements are minus infinity instead: of the array's shape, or 1 along axes that do not matter.
    """

    source: Any
    table: np.ndarray
    like: Any = None
    holes: np.ndarray | None = None


def by_tables(equations: Iterable[Any], outputs: Sequence[Any]) -> tuple[list[Any], list[Any], bool]:
    """The equations and outputs of a flat program, and whether something has changed; else the equations stay."""
    program = _Program()
    old = list(equations)
    for equation in old:
        program.add(equation)
    if not program.changed:
        return old, [*outputs], False
    results = [program.same(v) for v in outputs]
    program.need(results)
    return program.equations, results, True


class _Program:
    """A program that is written anew: what follows from bytes waits until it is read, in this form or another."""

    def __init__(self) -> None:
        self.equations: list[Any] = []
        self.changed = False
        self._waiting: dict[Any, Any] = {}
        """Variable -> its equation."""
        self._written: set[Any] = set()
        self._mapped: dict[Any, Mapped] = {}
        self._tables: set[Any] = set()
        """The variables that an equation computes of others element by element."""
        self._same: dict[Any, Any] = {}

    def same(self, variable: Any) -> Any:
        """The variable that holds the same."""
        return variable if isinstance(variable, Literal) else self._same.get(variable, variable)

    def add(self, equation: Any) -> None:
        """Take the next equation of the old program."""
        equation = equation.replace(invars=[self.same(v) for v in equation.invars])
        alone = len(equation.outvars) == 1 and not equation.effects
        if not (alone and (self._computed(equation) or self._selected(equation))):
            self.need(variables(equation.invars))
            self.equations.append(equation)

    def need(self, wanted: Sequence[Any]) -> None:
        """Write the equations that wait and lead to some variables."""

        def waits(variable: Any) -> Any:
            return None if variable in self._written else self._waiting.get(variable)

        for equation in _in_order(variables(wanted), waits, lambda e: variables(e.invars)):
            self.equations.append(equation)
            self._written.update(equation.outvars)

    def _value(self, variable: Any) -> Mapped | None:
        """How a variable follows from bytes, or the number that a literal is."""
        aval = variable.aval
        shape = getattr(aval, "shape", ())
        if isinstance(variable, Literal):
            return None if shape else Mapped(None, np.asarray(variable.val, aval.dtype))
        if variable not in self._mapped and shape and aval.dtype in BYTES:
            return Mapped(variable, _all_bytes(aval.dtype), variable)
        return self._mapped.get(variable)

    def _computed(self, equation: Any) -> bool:
        """Whether the result follows from bytes by a table."""
        operands = [self._value(v) for v in equation.invars]
        whole = [v for v in operands if v is not None and v.holes is None]
        sources = {v.source for v in whole} - {None}
        repeated = equation.primitive.name == "broadcast_in_dim" and not sources
        if not whole or len(whole) < len(operands) or len(sources) != (0 if repeated else 1):
            return False
        table = whole[0].table if repeated else _table(equation, [v.table for v in whole])
        if table is None:
            return False
        (result,), source = equation.outvars, None if repeated else sources.pop()
        self._waiting[result], self._mapped[result] = equation, Mapped(source, table, result)
        self._tables.add(result)
        bytes_again = source is not None and result.aval.dtype == source.aval.dtype
        if bytes_again and _equal(table, _all_bytes(table.dtype)):
            self._same[result] = source
            self.changed = True
        return True

    def _selected(self, equation: Any) -> bool:
        """Whether the result is elements of operands that follow from bytes by one table."""
        name, (result,) = equation.primitive.name, equation.outvars
        if name not in SELECTIONS:
            return False
        count = len(equation.invars) if name in ("max", "concatenate") else 1
        operands = [self._value(v) for v in equation.invars[:count]]
        known = [v for v in operands if v is not None and v.source is not None]
        if len(known) < count or len({v.source.aval.dtype for v in known}) > 1:
            return False
        first, rest = known[0], list(equation.invars[count:])
        of_bytes = all(v.source is w for v, w in zip(known, equation.invars, strict=False))
        if of_bytes or not all(_equal(v.table, first.table) for v in known[1:]):
            return False
        largest = "max" in name
        found = None if largest and not _keeps_order(first.table) else SELECTIONS[name](equation, known)
        if found is None:
            return False
        holes, filler = found
        moved = _of_type(result, result.aval.shape, first.source.aval.dtype)
        if filler is not None:
            rest = [Literal(filler, rest[0].aval.update(dtype=filler.dtype, weak_type=False))]
        self._waiting[moved] = equation.replace(invars=[*(v.source for v in known), *rest], outvars=[moved])
        self._waiting[result] = equation
        if largest and holes is None:
            self._again(first.like, moved, result)
            self.changed = True
        else:
            self._mapped[result] = Mapped(moved, first.table, first.like, holes)
        return True

    def _again(self, like: Any, moved: Any, result: Any) -> None:
        """Let the result be computed of other bytes as another variable is of its own."""
        names: dict[Any, Any] = {}

        def known(variable: Any) -> Any:
            mapped = None if isinstance(variable, Literal) else self._mapped.get(variable)
            return variable if mapped is None else mapped.like

        def step(variable: Any) -> Any:
            return self._waiting[variable] if variable in self._tables else None

        for equation in _in_order([like], step, lambda e: [known(v) for v in variables(e.invars)]):
            (old,), params = equation.outvars, equation.params
            new = result if old is like else _of_type(old, result.aval.shape, old.aval.dtype)
            if "shape" in params:
                params = {**params, "shape": result.aval.shape}
            operands = [v if isinstance(v, Literal) else names.get(known(v), moved) for v in equation.invars]
            self._waiting[new] = equation.replace(invars=operands, outvars=[new], params=params)
            self._tables.add(new)
            names[old] = new
            was = self._mapped[old]
            self._mapped[new] = Mapped(None if was.source is None else moved, was.table, new)


def _in_order(wanted: Sequence[Any], equation: Callable[[Any], Any], reads: Callable[[Any], list[Any]]) -> list[Any]:
    """The equations that lead to some variables, each once, behind those that it reads."""
    seen, found, left = set[Any](), list[Any](), [(v, False) for v in wanted]
    while left:
        v, is_read = left.pop()
        made = equation(v)
        if is_read:
            found.append(made)
        elif made is not None and v not in seen:
            seen.add(v)
            left += [(v, True), *((o, False) for o in reads(made))]
    return found


def _of_type(variable: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A new variable."""
    return Var(variable.aval.update(shape=shape, dtype=dtype, weak_type=False))


def _all_bytes(dtype: Any) -> np.ndarray:
    return np.arange(np.iinfo(dtype).min, np.iinfo(dtype).max + 1).astype(dtype)


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Bit by bit: zeros of two signs are two."""
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _table(equation: Any, tables: Sequence[np.ndarray]) -> np.ndarray | None:
    """The table of an equation's result; None where XLA's numbers might be others."""
    name, dtype = equation.primitive.name, np.dtype(equation.outvars[0].aval.dtype)
    if name == "round":
        exact = int(equation.params["rounding_method"]) == 1
        return np.rint(tables[0]) if exact else None
    if name == "convert_element_type" and tables[0].dtype.kind == "f" and dtype.kind in "iu":
        ends, inside = np.iinfo(dtype), np.trunc(tables[0])
        return tables[0].astype(dtype) if ((inside >= ends.min) & (inside <= ends.max)).all() else None
    if name not in (*ELEMENTWISE, "convert_element_type", "select_n", "copy") or not is_computable(equation):
        return None
    with np.errstate(all="ignore"):
        found = np.asarray(RULES[name](*tables, **equation.params), dtype)
    subnormal = dtype.kind == "f" and ((found != 0) & (abs(found) < np.finfo(dtype).tiny)).any()  # XLA has none
    return None if subnormal else np.broadcast_to(found, 256)


def _keeps_order(table: np.ndarray) -> bool:
    """Whether larger bytes never give less; zeros of two signs are in no order."""
    signs = table.dtype.kind == "f" and (np.signbit(table) & (table == 0)).any()
    return bool((table[1:] >= table[:-1]).all() and not signs)


# ------------------------------------------------------------------------------------------------------ selections

Found = tuple["np.ndarray | None", Any] | None
"""The holes of a result and the byte that it is filled up with, if it is; None where it does not follow."""


def _rearranged(_equation: Any, operands: Sequence[Mapped]) -> Found:
    return None if any(v.holes is not None for v in operands) else (None, None)


def _reshaped(equation: Any, operands: Sequence[Mapped]) -> Found:
    return None if equation.params.get("dimensions") is not None else _rearranged(equation, operands)


def _windowed(equation: Any, operands: Sequence[Mapped]) -> Found:
    """Each window holds an element: padding alone would be minus infinity."""
    given = equation.params
    names = ("window_dimensions", "window_strides", "padding", "window_dilation")
    rows = zip(operands[0].source.aval.shape, equation.outvars[0].aval.shape, *(given[n] for n in names), strict=True)
    for n, blocks, kernel, stride, (before, _), dilation in rows:
        place = np.arange(blocks)[:, None] * stride - before + np.arange(kernel) * dilation
        if not ((place >= 0) & (place < n)).any(1).all():
            return None
    return _rearranged(equation, operands) if {*given["base_dilation"]} <= {1} else None


def _reduced(equation: Any, operands: Sequence[Mapped]) -> Found:
    return _rearranged(equation, operands) if operands[0].source.aval.size else None


def _padded(equation: Any, operands: Sequence[Mapped]) -> Found:
    """With a number that a byte stands for, or with minus infinity."""
    (x,), value, config = operands, equation.invars[1], equation.params["padding_config"]
    if not isinstance(value, Literal) or any(min(ends) < 0 or ends[2] for ends in config):
        return None
    every, number = _all_bytes(x.source.aval.dtype), np.asarray(value.val, x.table.dtype)
    if x.holes is None and (at := [i for i, v in enumerate(x.table) if _equal(v, number)]):
        return None, every[at[0]]
    if x.table.dtype.kind != "f" or value.val != -np.inf:
        return None
    holes = np.zeros((1,) * len(config), bool) if x.holes is None else x.holes
    for axis, (n, (before, after, _)) in enumerate(zip(x.source.aval.shape, config, strict=True)):
        if before or after:
            around = [(0, 0)] * axis + [(before, after)] + [(0, 0)] * (len(config) - axis - 1)
            whole = holes if holes.shape[axis] == n else np.repeat(holes, n, axis)
            holes = np.pad(whole, around, constant_values=True)
    return holes, every[0]


def _sliced(equation: Any, operands: Sequence[Mapped]) -> Found:
    (x,), given = operands, equation.params
    if x.holes is None:
        return None, None
    steps = given["strides"] or (1,) * x.holes.ndim
    rows = zip(given["start_indices"], given["limit_indices"], steps, x.holes.shape, strict=True)
    return _holes(x.holes[tuple(slice(None) if n == 1 else slice(*ends) for *ends, n in rows)]), None


def _largest(_equation: Any, operands: Sequence[Mapped]) -> Found:
    holes = np.ones((), bool)
    for x in operands:
        holes = holes & (False if x.holes is None else x.holes)
    return _holes(holes), None


def _holes(holes: np.ndarray) -> np.ndarray | None:
    return holes if holes.any() else None


SELECTIONS: Final[Mapping[str, Callable[[Any, Sequence[Mapped]], Found]]] = {
    **dict.fromkeys(("broadcast_in_dim", "concatenate", "expand_dims", "rev", "squeeze", "transpose"), _rearranged),
    "max": _largest,
    "pad": _padded,
    "reduce_max": _reduced,
    "reduce_window_max": _windowed,
    "reshape": _reshaped,
    "slice": _sliced,
}
"""Primitive -> whether its result, elements of its operands, can be taken of bytes instead."""

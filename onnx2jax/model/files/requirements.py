"""Messages of ``jax.export`` read: constraints on symbolic dimensions, and what is wrong, in a user's terms."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import jax

from ...errors import OnnxError
from ...eval.node_errors import LIBRARY_FIX
from ...ir.graph import Graph
from ...jaxpr.program import Program
from .extents import evaluated, symbols_in

_SHORTENED: Final = re.compile(r"\bmin\((?:([a-zA-Z_]\w*), (\d+)|(\d+), ([a-zA-Z_]\w*))\)")
"""A table's extent where a symbol is longer, in messages of JAX: what reads the table needs a shorter one."""
_COMPARED: Final = re.compile(r"Symbolic dimension comparison '(.+?)' (?:>=|<) '(.+?)' is inconclusive")
_PADDED: Final = re.compile(
    r"axis size \(= (.+?)\) is larger than 1 and larger or equal than the padding length \(= (\d+)\)"
)
_SHAPE: Final = re.compile(r"must have the shape \[([^\[\]]+)\] \(it has (\(.+)")
_JOINED: Final = re.compile(r"concatenating along dimension (\d+) for shapes (\(.+\))")
_OPERAND: Final = re.compile(r"\w+\[([^\[\]]*)\]")
"""The shape of an operand, as eval/node_errors.py describes it."""
_FAR: Final = 10**6
_MOST: Final = 4096
_MULTIPLES: Final = 64 * 3**5 * 5**3 * 7**2
"""An extent that many numbers divide: what holds for multiples needs no fixed extent."""


def requirements(message: str, symbols: Collection[str], known: Collection[str] = ()) -> list[str]:
    """Constraints, beside those ``known``, without which a program ends in a message: bounds, equal extents.

    >>> requirements("concatenating along dimension 1 for shapes (a, 3), (b, 5).", ["a", "b"])
    ['b == a']
    >>> requirements("If (h must have the shape [2, batch, 64] (it has (2, 1, 64)))", ["batch"])
    ['batch == 1']
    >>> requirements("Symbolic dimension comparison 'frames - 2' >= '0' is inconclusive", ["frames"])
    ['frames >= 2']
    """
    return [c for c in dict.fromkeys(_constraints(message, symbols, known)) if c not in known]


def fixed_extents(message: str, symbols: Collection[str]) -> dict[str, list[int]]:
    """Extents of symbols, up to 4096, for which shapes in a message agree, if few do: no constraint says that.

    A text recogniser's image becomes one row: its height has to be fixed.

    >>> shapes = "concatenating along dimension 1 for shapes (n, 3, floordiv(h, 16)), (n, 4, 1)."
    >>> fixed_extents(shapes, ["n", "h"])["h"][:3]
    [16, 17, 18]
    >>> fixed_extents("concatenating along dimension 1 for shapes (n, 3, mod(h, 2)), (n, 4, 0).", ["n", "h"])
    {}
    """
    agreed: dict[str, list[int]] = {}
    for extent, number in (p for pair in _pairs(message) for p in itertools.permutations(pair)):
        with suppress(ValueError, SyntaxError, ArithmeticError):
            (symbol,) = symbols_in(extent)
            if symbol not in symbols or not number.isdigit() or extent in symbols:
                continue
            fits = [k for k in range(1, _MOST + 1) if evaluated(extent, {symbol: k}.__getitem__) == int(number)]
            if fits and evaluated(extent, {symbol: _MULTIPLES}.__getitem__) != int(number):
                agreed[symbol] = [k for k in agreed.get(symbol, fits) if k in fits]
    return {symbol: fits for symbol, fits in agreed.items() if fits}


def suggested(fits: Collection[int]) -> int:
    """Of extents that fit, the least that is a multiple of the largest power of two up to 16: images often are.

    >>> suggested(range(33, 81)), suggested([7, 9])
    (48, 7)
    """
    return next(k for step in (16, 8, 4, 2, 1) for k in sorted(fits) if k % step == 0)


def _pairs(message: str) -> Iterator[tuple[str, str]]:
    """Extents in a message that have to be equal; where shapes are broadcast, none of them is 1."""
    for one, other in _equal_shapes(message):
        yield from zip(one, other, strict=False)
    shapes = [_split(shape) for shape in _OPERAND.findall(message.partition("\noperands: ")[2].partition("\n")[0])]
    if "do not broadcast against each other" in message:
        for one, other in itertools.combinations(shapes, 2):
            yield from (p for p in zip(one[::-1], other[::-1], strict=False) if "1" not in p)
    if "inner extents of the matrices differ" in message and len(shapes) == 2 and all(shapes):
        yield shapes[0][-1], shapes[1][-2 if len(shapes[1]) > 1 else -1]


def _constraints(message: str, symbols: Collection[str], known: Collection[str]) -> Iterator[str]:
    for a, b, c, d in _SHORTENED.findall(message):
        yield f"{a or d} <= {b or c}"
    for left, right in _COMPARED.findall(message):
        yield from _bound(left, right, symbols, known)
    for size, padding in _PADDED.findall(message):
        yield from _bound(size, str(max(int(padding) + 1, 2)), symbols, known)
    for one, other in _equal_shapes(message):
        yield from _equal(one, other, symbols)


def _equal_shapes(message: str) -> Iterator[tuple[list[str], list[str]]]:
    """Pairs of shapes in a message that have to be equal; without the axis along which they are concatenated."""
    for required, actual in _SHAPE.findall(message):
        yield _split(required), _shapes(actual)[0]
    for axis, shapes in _JOINED.findall(message):
        first, *others = ([d for i, d in enumerate(shape) if i != int(axis)] for shape in _shapes(shapes))
        yield from ((first, other) for other in others)


def _split(text: str) -> list[str]:
    """The parts of a text between commas outside of parentheses, up to a parenthesis that is not opened in it.

    >>> _split("n, floordiv(h, 2)), 1")
    ['n', 'floordiv(h, 2)']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if depth < 0:
            break
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _shapes(text: str) -> list[list[str]]:
    """The extents of each of several shapes in parentheses.

    >>> _shapes("(n, floordiv(h, 2)), (3, 1)")
    [['n', 'floordiv(h, 2)'], ['3', '1']]
    """
    return [_split(shape[1:-1]) for shape in _split(text)]


def _equal(one: Collection[str], other: Collection[str], symbols: Collection[str]) -> Iterator[str]:
    """Equations between two shapes; none where no extent makes them equal."""
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if a != b]
    pairs = [(b, a) if b in symbols else (a, b) for a, b in pairs]
    if len(one) == len(other) and all(a in symbols and (b in symbols or b.isdigit()) for a, b in pairs):
        yield from (f"{a} == {b}" for a, b in pairs)


def _bound(left: str, right: str, symbols: Collection[str], known: Collection[str]) -> Iterator[str]:
    """That left is not less than right: as a bound of its symbol, if it has one and JAX sees that."""
    difference = f"({left}) - ({right})"
    try:
        names = symbols_in(difference)
        if names - set(symbols) or not any(_bounds_below(difference, one, names - {one}) for one in names):
            return  # an upper bound, or an order of two symbols, which would be arbitrary
        if len(names) == 1:
            (one,) = names
            least = (k for k in range(1, _MOST) if evaluated(difference, {one: k}.__getitem__) >= 0)
            bounds = [f"{one} >= {k}" for k in itertools.islice(least, 1)]
        else:
            bounds = _bounds(difference, names)
    except (ValueError, SyntaxError, ArithmeticError):
        return
    yield from [b for b in bounds if b not in known] or [f"{left} >= {right}"]


def _bounds(text: str, names: Collection[str]) -> list[str]:
    """Lower bounds of symbols from which on an expression is positive, whatever the others are, if JAX may need them.

    JAX takes minutes to decide comparisons under constraints of several long terms, and no time under these.
    """

    def holds(least: Mapping[str, int], factor: int) -> bool:
        return evaluated(text, {n: factor * least.get(n, 1) for n in names}.__getitem__) >= 0

    def least(one: str) -> int | None:
        others = dict.fromkeys(names, _FAR)
        return next((k for k in range(1, _MOST) if evaluated(text, (others | {one: k}).__getitem__) > 0), None)

    bounds = {n: k for n in sorted(names) if (k := least(n)) is not None and k > 1}
    return [f"{n} >= {k}" for n, k in bounds.items()] if bounds and all(holds(bounds, f) for f in (1, 7)) else []


def _bounds_below(text: str, one: str, others: Collection[str]) -> bool:
    """Whether an expression is negative for small extents of one symbol alone, whatever the others are."""

    def at(extent: int, other: int) -> bool:
        return evaluated(text, {one: extent, **dict.fromkeys(others, other)}.__getitem__) >= 0

    extents = (1, 7, _FAR)
    return all(at(_FAR, other) for other in extents) and len({at(1, other) for other in extents}) == 1


PREFIX: Final = "JAX cannot export the model: "
"""The beginning of messages that JAX wrote."""
_INSIDE: Final = "inside "
_MEANINGS: Final = (
    (r"Symbolic dimension comparison '(.+?)' (\S+) '(.+?)' is inconclusive\.?", r"whether \1 \2 \3 depends on extents"),
    (r"Symbolic dimension '(.+?)' used in a context that requires a constant\.?", r"it needs a fixed extent, not \1"),
    (r"Cannot divide (.+?) by (.+?)\.", r"\1 must be a multiple of \2"),
    (r"'_DimExpr' object cannot be interpreted as an integer", "it needs fixed extents"),
    (
        r"MLIR translation rule for primitive '(\w+)' not found for platforms? (.+)",
        r"JAX has no '\1' for \2: leave it out, export(platforms=[...])",
    ),
    (r"multi-platform lowering for (\w+)", r"JAX lowers '\1' for one platform at a time: export(platforms=['cpu'])"),
    (r"serialization of host_callbacks is not yet implemented", "jax.export cannot store calls of Python functions"),
)
"""What messages of JAX mean; the first of a program's primitives in them tells the node."""
_PRIMITIVE: Final = re.compile(r"primitive '(\w+)' not found|multi-platform lowering for (\w+)")
_SYMBOL: Final = re.compile(r"[A-Za-z_]\w*")


def without_internals(text: str) -> str:
    """A message of JAX without scopes, and advice for those who write in JAX."""
    return re.split(r"\n+(?:Using symbolic scope|This error arises for)", text, maxsplit=1)[0]


def in_our_terms(text: str) -> str:
    """A message in which what JAX says of symbolic dimensions and platforms is in a user's terms.

    >>> in_our_terms("Symbolic dimension comparison 'n - 2' > '5' is inconclusive.")
    'whether n - 2 > 5 depends on extents'
    """
    for pattern, meaning in _MEANINGS:
        text = re.sub(pattern, meaning, text)
    return text


@contextmanager
def explained(dimensions: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Errors of the block name the node first, and the dimensions that JAX has to know.

    Args:
        dimensions: the free dimensions by symbol.
    """
    try:
        yield
    except OnnxError as e:
        notes = [n for n in getattr(e, "__notes__", ()) if not n.startswith("---")]  # JAX's, about tracebacks
        before = e.message.replace(f"\n{LIBRARY_FIX}", "")  # nobody gave inputs
        message = in_our_terms(before)
        if message != before:
            named = {n for m, _ in _MEANINGS[:3] for match in re.finditer(m, before) for n in _SYMBOL.findall(match[0])}
            names = [name for symbol, name in dimensions().items() if symbol in named]
            notes[:0] = [f"fix {n!r}, to an extent of yours: export(dims={{{n!r}: 512}})" for n in names]
        if message.startswith(PREFIX) and (where := next((n for n in notes if n.startswith(_INSIDE)), "")):
            notes.remove(where)
            node, _, operands = where.removeprefix(_INSIDE).partition("\n")
            message = "\n".join(filter(None, (f"{node}: {message.removeprefix(PREFIX)}", operands)))
        e.message = message
        vars(e)["__notes__"] = notes
        raise


def node_of_primitive(text: str, function: Any, arguments: Sequence[Any], graph: Graph) -> str:
    """A note about the first node that a primitive, which a message of JAX names, comes from; empty if unknown."""
    if (primitive := _PRIMITIVE.search(text)) is None:
        return ""

    def scopes(program: Program, around: str) -> Iterator[str]:
        for equation in program.equations:
            scope = f"{around}/{equation.scope}"
            if equation.name in primitive.groups():
                yield scope
            for inner in equation.inner:
                yield from scopes(inner, scope)

    places = scopes(Program.of(jax.make_jaxpr(function)(*arguments)), "")
    nodes = (node for scope in places for node in graph.nodes if f"/{node.name}/" in f"{scope}/")
    return next((f"{_INSIDE}{node}" for node in nodes), "")

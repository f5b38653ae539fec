"""The order of statements, and what is in them: shared masks first, expressions with one reader inside of that.

What comes of parameters is next to its reader. An expression without a name of its own becomes part of its reader.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ...proto.types import TensorType
from .code import CONSTANT, EXTENT, FUNCTION, MARK, PARAM, Block, Statement, mapped, mark, references, substituted
from .layers import Loop
from .render import hint, without_numbers

LONGEST: Final = 96
"""Characters of an expression with others inside."""
MOST: Final = 6
"""Nodes of the model in one expression."""
WINDOW: Final = 8
"""Lines that an expression may move down to its reader."""
_STEP: Final = re.compile(r"\w+\(|\x02function:")
"""Begins a call of an operator's function, or of a function of the module: a line of its own."""
_ACTIVATION: Final = re.compile(r"nn\.\w+\(")
_RESHAPED: Final = re.compile(r"(.*)\.reshape\([^()]*\)")
_INDEX: Final = r"\[((?:None|:)(?:, (?:None|:))*)\]"
"""An index that adds axes."""
_PRECEDENCE: Final[Mapping[type[ast.AST], int]] = {
    **{ast.IfExp: -1, ast.Compare: 0, ast.BitOr: 1, ast.BitXor: 2, ast.BitAnd: 3, ast.Add: 4, ast.Sub: 4},
    **{ast.UnaryOp: 6, ast.Pow: 7},
    **{ast.MatMult: 5, ast.Mult: 5, ast.Div: 5, ast.FloorDiv: 5, ast.Mod: 5},
}
_ATOM: Final = 9


def with_silu(statements: Sequence[Statement], results: Sequence[str]) -> list[Statement]:
    """The statements, with ``nn.silu(x)`` in place of ``x * nn.sigmoid(x)``, which exporters write as two nodes."""
    readers = Counter([*results, *(r for s in statements for r in s.reads())])
    gates = {s.outputs[0]: s for s in statements if s.text.startswith("nn.sigmoid(") and readers[s.outputs[0]] == 1}
    new = list[Statement]()
    for statement in statements:
        factors = [references(t) for t in statement.text.split(" * ")]
        for a, b in (factors, factors[::-1]) if list(map(len, factors)) == [1, 1] else ():
            if b[0] in gates and gates[b[0]].text == f"nn.sigmoid({mark(a[0])})":
                statement.text = f"nn.silu({mark(a[0])})"
                new.remove(gates[b[0]])
                break
        new.append(statement)
    return new


def early(statements: Sequence[Statement], params: Mapping[str, TensorType]) -> list[Statement]:
    """The statements, with those first that layers share: masks and positions, computed of inputs or parameters alone.

    Scalars are no parameters here: they fill masks.
    """
    late: set[str] = set()
    sources: dict[str, set[str]] = {}
    groups: tuple[list[Statement], list[Statement]] = [], []
    for statement in statements:
        reads, origins = statement.reads(), set[str]()
        for reference in reads:
            if reference.startswith(PARAM):
                shape = params[reference.removeprefix(PARAM)].shape or ()
                origins |= set() if all(d == 1 for d in shape) else {"parameter"}
            elif not reference.startswith((CONSTANT, EXTENT, FUNCTION)):
                origins |= sources.get(reference, {"input"})
        is_late = statement.heavy or not late.isdisjoint(reads) or len(origins) > 1
        groups[is_late].append(statement)
        late |= set(statement.outputs) if is_late else set()
        sources |= dict.fromkeys(statement.outputs, origins)
    return [*groups[0], *groups[1]]


def scheduled(
    statements: Sequence[Statement], results: Sequence[str], params: Mapping[str, TensorType]
) -> list[Statement]:
    """The statements, with what is computed from parameters alone right before its only reader.

    Args:
        statements: of one function.
        results: references that it returns.
        params: types of parameters by key.
    """
    statements = early(with_silu(statements, results), params)
    fixed: set[str] = set()
    readers = Counter(r for s in statements for r in s.reads())
    waiting: dict[str, Statement] = {}
    new: list[Statement] = []

    def place(statement: Statement) -> None:
        for reference in dict.fromkeys(references(statement.text)):
            if reference in waiting:
                place(waiting.pop(reference))
        new.append(statement)

    for statement in statements:
        reads = {r for r in statement.reads() if not r.startswith((PARAM, CONSTANT, FUNCTION))}
        if reads <= fixed and (reads or PARAM in statement.text):
            fixed |= set(statement.outputs)
            if len(statement.outputs) == 1 and not statement.blocks and readers[statement.outputs[0]] == 1:
                waiting[statement.outputs[0]] = statement
                continue
        for block in statement.blocks:  # what a function inside reads is placed before it
            for reference in block.reads() & waiting.keys():
                place(waiting.pop(reference))
        place(statement)
    while waiting:
        place(waiting.pop(next(iter(waiting))))
    return new


def has_wide(block: Block) -> bool:
    """Whether a statement of a block needs 64-bit types."""
    return any(s.wide or any(map(has_wide, s.blocks)) for s in block.statements)


def texts(blocks: Sequence[Block]) -> Iterator[str]:
    """The texts of all expressions in blocks, those inside included."""
    for block in blocks:
        yield block.result
        for statement in block.statements:
            yield statement.text
            if isinstance(statement, Loop):
                yield from statement.arguments
            yield from texts(statement.blocks)


def called(blocks: Sequence[Block], functions: Sequence[Block]) -> set[str]:
    """References of the functions that blocks call, directly or through others."""
    reached: set[str] = set()
    todo = list(blocks)
    while todo:
        read = {r for t in texts([todo.pop()]) for r in references(t) if r.startswith(FUNCTION)}
        todo += [f for f in functions if f.reference in read - reached]
        reached |= read
    return reached


def nest(block: Block, wanted: Mapping[str, str], extents: Mapping[str, str], *, is_model: bool) -> None:
    """Nest the expressions of a function, and of the functions inside.

    Args:
        block: the function.
        wanted: names of the model's outputs, by reference.
        extents: names of dimension variables, by reference.
        is_model: whether it is the model itself, whose outputs have names.
    """

    def name(reference: str) -> str:
        return without_numbers(wanted.get(reference, "")) or hint(reference)

    def length(text: str) -> int:
        return len(substituted(text, lambda r: mapped(r) or extents.get(r) or name(r)))

    uses = Counter(references(block.result))
    for statement in block.statements:
        uses.update(references(statement.text))
        for inner in statement.blocks:
            nest(inner, wanted, extents, is_model=False)
            uses.update([*inner.reads()] * 2)
        uses.update([*statement.reads()] * 2 if isinstance(statement, Loop) else [])
    nodes = dict[int, int]()
    kept: list[Statement] = []

    def taken(text: str, reader: Statement | None) -> str:
        """The text with the expressions of statements shortly before inside that only it reads."""
        names = {"h", *(map(name, reader.outputs) if reader is not None else ())}
        for statement in kept[: -WINDOW - 1 : -1]:
            reference = statement.outputs[0]
            if uses[reference] != 1 or mark(reference) not in text or not _nests(statement, text):
                continue
            joined = placed(text, reference, statement.text)
            count = nodes.get(id(reader), 1) + nodes.get(id(statement), 1)
            if name(reference) in names and length(joined) <= LONGEST and count <= MOST:
                text, nodes[id(reader)] = joined, count
                kept.remove(statement)
        return text

    for statement in block.statements:
        if not isinstance(statement, Loop):
            _branch(statement)
            statement.text = taken(statement.text, statement)
        kept.append(statement)
    if not is_model and not block.result.startswith("\x02state"):
        block.result = taken(block.result, None)
    block.statements = kept


def _nests(statement: Statement, reader: str) -> bool:
    """Whether a statement is an expression that may be part of another."""
    if isinstance(statement, Loop) or len(statement.outputs) != 1 or statement.blocks or statement.target:
        return False
    if _STEP.match(statement.text) or statement.several:
        return False
    return not (_STEP.match(reader) and _ACTIVATION.match(statement.text))


def _branch(statement: Statement) -> None:
    """A choice between functions that are one expression each, as a conditional expression."""
    results = {f"{mark(b.reference)}()": b for b in statement.blocks if not b.statements and not b.opening}
    if len(results) != len(statement.blocks) or not results or " if " not in statement.text:
        return
    for call, block in results.items():
        tree = _parsed(block.result)
        several = isinstance(tree, ast.Tuple) and len(tree.elts) > 1
        statement.text = statement.text.replace(call, f"({block.result})" if several else block.result)
    statement.blocks, statement.inside = (), ()


# -------------------------------------------------------------------------------------------------------- parentheses


def placed(text: str, reference: str, expression: str) -> str:
    """The text with an expression in place of a reference that it has once, in parentheses where it needs them.

    >>> placed("\\x02a\\x03 * 2", "a", "x + 1"), placed("f(\\x02a\\x03)", "a", "x + 1")
    ('(x + 1) * 2', 'f(x + 1)')
    """
    tree = _parsed(text.replace(mark(reference), "_here"))
    parent, field = next(
        ((node, name) for node in ast.walk(tree) for name, value in ast.iter_fields(node) if _is_here(value)),
        (tree, ""),
    )
    level, power = _level(_parsed(expression)), isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Pow)
    match parent:
        case ast.BinOp():
            outer = _level(parent)
            bare = level > outer or (level == outer and field == "left" and not power)
            bare &= not (isinstance(parent.op, ast.MatMult) and level == outer)  # beside other products, for readers
        case ast.Compare() | ast.UnaryOp():
            bare = level > _level(parent)
        case ast.Attribute() | ast.Subscript() if field == "value":
            bare = level == _ATOM
        case ast.IfExp():
            bare = level > 0
        case _:
            bare = True
    first, second = re.search(_INDEX + "$", expression), re.search(re.escape(mark(reference)) + _INDEX, text)
    if first and second:  # one index instead of two
        index = _composed(first[1].split(", "), second[1].split(", "))
        expression = f"{expression[: first.start()]}[{', '.join(index)}]"
        text = f"{text[: second.start()]}{mark(reference)}{text[second.end() :]}"
    reshaped = _RESHAPED.fullmatch(expression)
    if reshaped and field == "value" and isinstance(parent, ast.Attribute) and parent.attr == "reshape":
        expression = reshaped.group(1)  # the last shape counts
    if power and not re.fullmatch(MARK, expression):
        text = text.replace(f"{mark(reference)}**", f"{mark(reference)} ** ")
    return text.replace(mark(reference), expression if bare else f"({expression})")


def _composed(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """The index of two that add axes, one after the other.

    >>> _composed([":", "None"], [":", ":", "None"]), _composed(["None"], ["None"])
    ([':', 'None', 'None'], ['None', 'None'])
    """
    left = iter(first)
    return [next(left, ":") if part == ":" else part for part in second] + [*left]


def _is_here(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(v, ast.Name) and v.id == "_here" for v in values)


def _level(tree: ast.expr) -> int:
    return _PRECEDENCE.get(type(tree.op if isinstance(tree, ast.BinOp) else tree), _ATOM)


def _parsed(text: str) -> ast.expr:
    return ast.parse(MARK.sub("_", text), mode="eval").body

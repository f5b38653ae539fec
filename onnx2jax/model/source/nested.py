"""Nested expressions: what has no name of its own and one reader becomes part of its reader's expression."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from .code import MARK, Block, Statement, mapped, mark, references, substituted
from .layers import Loop
from .names import hint, without_numbers

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

_PRECEDENCE: Final[Mapping[type[ast.AST], int]] = {
    **{ast.IfExp: -1, ast.Compare: 0, ast.BitOr: 1, ast.BitXor: 2, ast.BitAnd: 3, ast.Add: 4, ast.Sub: 4},
    **{ast.UnaryOp: 6, ast.Pow: 7},
    **{ast.MatMult: 5, ast.Mult: 5, ast.Div: 5, ast.FloorDiv: 5, ast.Mod: 5},
}
_ATOM: Final = 9


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

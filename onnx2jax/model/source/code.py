"""Statements of generated source, whose values are marked in the text until they have names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

MARK: Final = re.compile("\x02([^\x03]*)\x03")
PARAM, CONSTANT, EXTENT, FUNCTION = "param:", "constant:", "extent:", "function:"
"""What a reference begins with that is no value: a parameter, a stored constant, a dimension variable, a function."""


def mark(reference: str) -> str:
    """A reference as it stands in the text of a statement."""
    return f"\x02{reference}\x03"


def references(text: str) -> list[str]:
    """The references in a text, in order, each as often as it occurs."""
    return MARK.findall(text)


def substituted(text: str, name: Callable[[str], str]) -> str:
    """The text with each reference replaced."""
    return MARK.sub(lambda m: name(m.group(1)), text)


def mapped(reference: str) -> str:
    """The text of a parameter or a stored constant, which a mapping has by name; empty for other references."""
    for prefix, mapping in ((PARAM, "params"), (CONSTANT, "CONSTANTS")):
        if reference.startswith(prefix):
            return f"{mapping}[{string(reference.removeprefix(prefix))}]"
    return ""


def string(text: str) -> str:
    """A string in the quotes that ruff prefers."""
    plain = repr(text)
    return plain if '"' in text else f'"{plain[1:-1]}"' if plain[0] == "'" and "\\'" not in plain else plain


@dataclass(eq=False)
class Block:
    """A function inside a statement: a branch, the body of a loop, or a function of the model.

    Attributes:
        reference: its own, for the text that calls it.
        hint: the name that it would like.
        formals: references of its arguments, as the text of a signature.
        statements: its body.
        result: what it returns.
        opening: lines before the body, such as the unpacking of a state.
        docstring: its docstring, if it has one.
    """

    reference: str
    hint: str
    formals: str
    statements: list[Statement] = field(default_factory=list)
    result: str = ""
    opening: tuple[str, ...] = ()
    docstring: str = ""

    @property
    def arguments(self) -> list[str]:
        """The references that it binds itself."""
        return references(self.formals + "".join(o.partition(" = ")[0] for o in self.opening))

    @property
    def used(self) -> set[str]:
        """References that its body reads, its arguments included."""
        return set(references(self.result)).union(*(s.reads() for s in self.statements))

    def reads(self) -> set[str]:
        """References from outside that it reads."""
        bound, read = {self.reference, *self.arguments}, set[str]()
        for statement in self.statements:
            read |= statement.reads() - bound
            bound |= set(statement.outputs)
        return read | (set(references(self.result)) - bound)


@dataclass(eq=False)
class Statement:
    """``outputs = text``.

    Attributes:
        outputs: references that it defines, "" for one that nothing reads.
        text: an expression.
        blocks: functions that it defines first.
        heavy: whether it is a convolution, a matrix product or the like.
        node: the node that it computes.
        several: whether the expression is a tuple of the outputs.
        target: the left-hand side, if it is no list of the outputs.
        wide: whether it needs 64-bit types.
        hint: a name for what has none in the file.
        inside: the node that notes of its errors name, and the inputs that decide it; empty for none.
    """

    outputs: tuple[str, ...]
    text: str
    blocks: tuple[Block, ...] = ()
    heavy: bool = False
    node: Any = None
    several: bool = False
    target: str = ""
    wide: bool = False
    hint: str = "h"
    inside: tuple[str, ...] = ()

    def reads(self) -> set[str]:
        """References from outside that it reads."""
        read = set(references(self.text)).union(*(b.reads() for b in self.blocks))
        return read - {b.reference for b in self.blocks}


def live(statements: Iterable[Statement], wanted: Iterable[str]) -> list[Statement]:
    """The statements from which the wanted references are computed; outputs that nothing reads are ""."""
    needed, kept = set(wanted), list[Statement]()
    for statement in reversed([*statements]):
        if needed.isdisjoint(statement.outputs):
            continue
        statement.outputs = tuple(o if o in needed else "" for o in statement.outputs)
        for block in statement.blocks:
            block.statements = live(block.statements, references(block.result))
        needed |= statement.reads()
        kept.append(statement)
    return kept[::-1]


def canonical(block: Block) -> str:
    """The text of a function with values numbered, the same for functions that compute the same."""
    numbers: dict[str, str] = {}
    inside = {block.reference}

    def name(reference: str) -> str:
        if reference.startswith((PARAM, CONSTANT, EXTENT, FUNCTION)) and reference not in inside:
            return reference
        return numbers.setdefault(reference, f"v{len(numbers)}")

    def lines(block: Block) -> Iterator[str]:
        yield substituted("; ".join((block.formals, *block.opening)), name)
        for statement in block.statements:
            inside.update(inner.reference for inner in statement.blocks)
            for inner in statement.blocks:
                yield from lines(inner)
            yield f"{[name(o) if o else o for o in statement.outputs]} = {substituted(statement.text, name)}"
        yield substituted(block.result, name)

    return "\n".join(lines(block))


# ------------------------------------------------------------------------------------------------------------ layout

WIDTH: Final = 120
PRECEDENCE: Final = (
    (" == ", " < ", " > ", " <= ", " >= "),
    (" | ",),
    (" ^ ",),
    (" & ",),
    (" + ", " - "),
    (" @ ", " * ", " / ", " // "),
)
OPERATORS: Final = tuple(operator for level in PRECEDENCE for operator in level)
_CLOSING: Final = ")]}"


def layout(text: str, indent: int, tail: int = 0) -> Iterator[str]:
    """The lines of a statement as ``ruff format`` writes them.

    Args:
        text: the statement on one line.
        indent: its indentation.
        tail: characters that follow the last line.
    """
    space = " " * indent
    if indent + len(text) + tail <= WIDTH:
        yield space + text
        return
    target, equals, value = _assignment(text)
    if (operators := _at_top(value, OPERATORS)) and not value.startswith(("return ", "for ", "def ")):
        starts = [0]
        if indent + 4 + len(value) > WIDTH:
            level = next(level for level in PRECEDENCE if any(o in level for _, o in operators))
            starts += [i + 1 for i, o in operators if o in level]
        yield f"{space}{target}{equals}("
        for start, end in pairwise([*starts, len(value)]):
            yield from layout(value[start:end].strip(), indent + 4)
        yield f"{space})"
        return
    end = len(text) - 1 if text[-1] in _CLOSING else text.rfind(")")
    start = _opening(text, end) if end > 0 else -1
    if start > 0 and text[start] == "[" and text[start - 1] == ")":  # the subscript of a call is not what is split
        end = start - 1
        start = _opening(text, end)
    if start < 0 or end - start < 4:
        yield space + text  # nothing to split at, as in a long name
        return
    head, body, rest = text[: start + 1], text[start + 1 : end], text[end:]
    yield space + head
    if text[start] == "[" and re.match(r"\w", text[start - 1 : start]) and re.fullmatch(r"f?\"[^\"]*\"", body):
        yield from (f"{space}    {body}", space + rest)
        return
    if indent + 4 + len(body) <= WIDTH and not body.endswith(","):
        yield f"{space}    {body}"
    else:
        items = [*_items(body)]
        for item in items:
            *first, last = layout(item, indent + 4, 1)
            yield from first
            yield last + ("," if len(items) > 1 or item is not items[-1] or not _is_bracketed(item) else "")
    yield space + rest


def _is_bracketed(item: str) -> bool:
    return item[-1] in _CLOSING and item[0] in "([{"


def _assignment(text: str) -> tuple[str, str, str]:
    """(target, " = ", value) of an assignment; ("", "", text) of another statement."""
    for place, _ in _at_top(text, (" = ",)):
        return text[:place], " = ", text[place + 3 :]
    return "", "", text


def _depths(text: str) -> Iterator[tuple[int, str, int]]:
    """(place, character, number of brackets around it) of each character outside of strings."""
    depth, quote = 0, ""
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote and text[i - 1] != "\\" else quote
        elif c in "\"'":
            quote = c
        else:
            depth -= c in _CLOSING
            yield i, c, depth
            depth += c in "([{"


def _at_top(text: str, parts: Iterable[str]) -> list[tuple[int, str]]:
    """Where one of the parts occurs outside of brackets and strings."""
    places = [i for i, c, depth in _depths(text) if c in " ," and depth == 0]
    return [(i, p) for i in places for p in parts if text.startswith(p, i)]


def _opening(text: str, end: int) -> int:
    """The bracket that the one at ``end`` closes; -1 where there is none."""
    *before, (last, _, level) = (-1, "", 0), *_depths(text[: end + 1])
    opening = (i for i, c, depth in reversed(before) if c in "([{" and depth == level)
    return next(opening, -1) if last == end else -1


def _items(body: str) -> Iterator[str]:
    for start, end in pairwise([0, *(place + 2 for place, _ in _at_top(body, (", ",))), len(body)]):
        yield body[start:end].rstrip(", ")

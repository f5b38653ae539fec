"""The order of statements, and what is in them: shared masks first, what comes of parameters next to its reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ...proto.types import TensorType
from .code import CONSTANT, EXTENT, FUNCTION, PARAM, Block, Statement, mark, references
from .layers import Loop


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

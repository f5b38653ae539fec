"""Functions as lines of Python: names for references, and the layout of statements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from .code import CONSTANT, EXTENT, PARAM, Block, Statement, layout, mapped, references, string, substituted
from .layers import INDEX, Loop
from .names import Identifiers, hint, without_numbers

FIXED = {INDEX: "i", "state": "carry", "element": "element"}


class Renderer:
    """Renders the functions of one module.

    Attributes:
        functions: names of functions at the top of the module, by reference.
        extents: names of dimension variables, by reference.
        wanted: names of the model's outputs, by reference.
        reserved: identifiers of imports and modules.
    """

    def __init__(
        self, functions: dict[str, str], extents: dict[str, str], wanted: dict[str, str], reserved: set[str]
    ) -> None:
        self.functions, self.extents, self.wanted = functions, extents, wanted
        self.reserved = reserved | {"params", "rng", "once", "model", "load_params", "Outputs", *FIXED.values()}
        self.reserved |= set(functions.values())

    def text(self, text: str, names: Identifiers | None = None) -> str:
        """A text with names for its references; without any, for a text of parameters and constants."""

        def name(reference: str) -> str:
            fixed = mapped(reference) or FIXED.get(reference) or self.functions.get(reference)
            return fixed or (names.text(reference) if names else reference)

        return substituted(text, name)

    def function(
        self, block: Block, signature: str = "", opening: Sequence[str] = (), arguments: Mapping[str, str] | None = None
    ) -> Iterator[str]:
        """The lines of a function at the top of the module.

        Args:
            block: the function.
            signature: the text behind its name; by default that of its formals.
            opening: lines between the signature and the body.
            arguments: names of its arguments, by reference, if they have names already.
        """
        names = Identifiers({}, self.reserved, is_model=bool(signature))
        if arguments is None:
            self._bind(block, names)
        for reference, name in (arguments or {}).items():
            names.take(reference, name)
        formals = self.text(block.formals, names)
        yield from layout(f"def {self.functions[block.reference]}{signature or f'({formals}):'}", 0)
        yield from [f'    """{block.docstring}"""'] if block.docstring else ()
        yield from opening
        yield from self._body(block, names, 4)

    def _bind(self, block: Block, names: Identifiers) -> None:
        read = block.used
        for reference in block.arguments:
            if reference not in read:
                names.of[reference] = "_"
            elif reference not in FIXED:
                wanted = without_numbers(self.wanted.get(reference, "")) or hint(reference)
                wanted = self.extents.get(reference, wanted)
                names.bind(reference, wanted, "step" if wanted == "i" else "h")

    def _body(self, block: Block, names: Identifiers, indent: int) -> Iterator[str]:
        for line in block.opening:
            yield from layout(self.text(line, names), indent)
        last: dict[str, int] = {}
        for k, statement in enumerate(block.statements):
            last |= dict.fromkeys(statement.reads(), k)
        last |= dict.fromkeys(references(block.result), len(block.statements))
        names.release(set(block.arguments) - last.keys())
        for k, statement in enumerate(block.statements):
            dying = [r for r, at in last.items() if at == k and not r.startswith((PARAM, EXTENT, CONSTANT))]
            lines = self._loop(statement, names, indent, dying) if isinstance(statement, Loop) else None
            yield from lines or self._statement(statement, names, indent, dying)
        yield from layout(f"return {self.text(block.result, names)}".rstrip(), indent)

    def _statement(self, statement: Statement, names: Identifiers, indent: int, dying: Sequence[str]) -> Iterator[str]:
        for inner in statement.blocks:
            yield from self._nested(inner, names, indent)
        text = self.text(statement.text, names)
        names.release([*dying, *(b.reference for b in statement.blocks)])
        outputs = statement.outputs
        wanted = [self._hint(o, names) or statement.hint for o in outputs]
        named = [names.bind(o, w) if o else "_" for o, w in zip(outputs, wanted, strict=True)]
        if statement.target:
            target = self.text(statement.target, names)
        elif statement.several and sum(n != "_" for n in named) == 1:
            at = next(i for i, n in enumerate(named) if n != "_")
            target, text = named[at], f"{text}[{at}]"
        else:
            target = ", ".join(named)
        if statement.inside:
            yield from layout(f"with inside({', '.join(map(string, statement.inside))}):", indent)
            indent += 4
        yield from layout(f"{target} = {text}", indent)

    def _hint(self, reference: str, names: Identifiers) -> str:
        """What a reference would like to be called; empty where its name in the file says nothing."""
        wanted = self.wanted.get(reference, "")
        name = (wanted if names.is_model else without_numbers(wanted)) or hint(reference)
        return name if name != "h" else ""

    def _nested(self, block: Block, names: Identifiers, indent: int) -> Iterator[str]:
        """A function inside of a function, which reads values around it."""
        name = names.bind(block.reference, block.hint, block.hint)
        outside = {names.of[r] for r in block.reads() if r in names.of}
        inner = Identifiers(names.of, self.reserved | outside | {name}, is_model=names.is_model)
        self._bind(block, inner)
        yield ""
        yield " " * indent + f"def {name}({self.text(block.formals, inner)}):"
        yield from self._body(block, inner, indent + 4)
        yield ""

    def _loop(self, loop: Loop, names: Identifiers, indent: int, dying: Sequence[str]) -> Iterator[str]:
        space = " " * indent
        for reference, values in loop.columns.items():
            text = ", ".join(names.text(v) for v in values)
            wanted = f"{without_numbers(names.text(values[0]))}s"
            yield from layout(f"{names.bind(reference, wanted)} = [{text}]", indent)
        shared = {r for a in loop.arguments for r in references(a)} - set(loop.carries)
        starts = [names.text(s) for s in loop.starts]
        free = [s in dying and s not in shared and loop.starts.count(s) == 1 for s in loop.starts]
        names.release([s for s, f in zip(loop.starts, free, strict=True) if f])
        carries = []
        for reference, start, is_free in zip(loop.carries, starts, free, strict=True):
            # The variable before the loop goes on as the carry, where nothing else reads it.
            carries.append(names.bind(reference, start if is_free else self._hint(reference, names) or "h"))
        for carry, start in zip(carries, starts, strict=True):
            if carry != start:
                yield f"{space}{carry} = {start}"
        rows, lists = [], []
        for k, (reference, values) in enumerate(loop.rows.items()):
            wanted = without_numbers(self.wanted.get(reference, "")) or hint(reference)
            rows.append(names.bind(f"{reference}\x04row", wanted if wanted != "h" else "row"))
            lists.append(names.bind(f"{reference}\x04rows{k}", f"{rows[-1]}s"))
            names.of |= {v: f"{lists[-1]}[{i}]" for i, v in enumerate(values) if v}
        for name in lists:
            yield f"{space}{name} = []"
        index = "i" if any(INDEX in references(a) for a in loop.arguments) else "_"
        yield f"{space}for {index} in range({loop.count}):"
        call = f"{self.functions[loop.layer.reference]}({', '.join(self.text(a, names) for a in loop.arguments)})"
        yield from layout(f"{', '.join([*carries, *rows])} = {call}", indent + 4)
        for name, row in zip(lists, rows, strict=True):
            yield f"{space}    {name}.append({row})"
        names.release([*dying, *(f"{r}\x04row" for r in loop.rows)])


def tidy(lines: Sequence[str]) -> list[str]:
    """Lines without empty ones at the start of a block, or several in a row."""
    kept = [line for above, line in pairwise(["", *lines]) if line or (above and not above.endswith(":"))]
    return kept if kept[-1] else kept[:-1]

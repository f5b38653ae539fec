"""Functions as lines of Python: identifiers for references, and the layout of statements.

Identifiers are from the names in the file: short, valid, and used again once a value is dead.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, pairwise
from typing import Final

from ...ops.registry import supported
from .calls import BUILTINS, snake
from .code import CONSTANT, EXTENT, PARAM, Block, Statement, layout, mapped, references, string, substituted
from .layers import INDEX, Loop

LONGEST: Final = 24
"""Characters of an identifier."""
_GENERIC: Final = (
    "self model module output outputs out tensor value result layer layers block blocks default graph main torch jit y "
    "forward val tmp statefulpartitionedcall onnx readvariableop partitionedcall functional sequential network net"
)
GENERIC: Final = frozenset(_GENERIC.split())
"""Parts of names that say nothing."""
TRANSPOSED: Final = frozenset({"adjustedinput", "convolutionoutput", "transposeoutput", "pushtransposeout"})
"""Names that tf2onnx gives to what it inserts."""
SKL2ONNX: Final = re.compile(r"_(C|Y|Z|output|reduced|transposed|reshaped|concat_result)\d+$")
"""Ends names that skl2onnx gives to results, of the operator that computes them: ``wei_C0``, ``bprob_reduced01``."""
_OTHERS: Final = (
    "biasadd fusedbatchnormv3 conv2d depthwise onnx tensordot addmm arange eq ge gt le lt ne permute scalartensor "
    "tocopy view"
)
OPERATORS: Final = frozenset([*(n.lower() for names in supported().values() for n in names), *_OTHERS.split()])
"""Parts of names that are operators."""
FIXED = {INDEX: "i", "state": "carry", "element": "element"}


def identifier(name: str) -> str:
    """A name as a lower-case identifier, "" if nothing is left.

    >>> identifier("inputIds:0"), identifier("12"), identifier("class")
    ('input_ids', '', 'class_')
    """
    name = re.sub(r":\d+$", "", name)
    name = re.sub(r"\W+", "_", snake(name) if not name.isupper() else name.lower()).strip("_")
    name = re.sub(r"_+", "_", name)
    if not name or name[0].isdigit() or not name.isidentifier():
        return ""
    return f"{name}_" if keyword.iskeyword(name) or name in BUILTINS else name


def hint(name: str) -> str:
    """A name for a value that a node computes: the part of its name that says most.

    >>> hint("/encoder/layer.0/attention/self/query/MatMul_output_0"), hint("onnx::Add_12"), hint("logits")
    ('query', 'h', 'logits')
    """
    name = name.partition("\x04")[0]
    parts = [p for p in re.sub(r"\w*__Inline_\d+__", "/", name).split("/") if p]
    if len(parts) > 1 and not name.startswith("/") and _is_operator(parts[-1]):
        parts = parts[1:]  # TensorFlow's names begin with that of the network
    for part in reversed(parts):
        part = re.sub(r"^onnx::|_output_\d+$|:\d+$|(_quant\w*|_Quantize\w*|_Dequantize\w*)$", "", part)
        words = [w for w in part.split(".") if w and not w.isdigit()]
        for word in reversed(words):
            word = re.sub(r"_\d+$", "", SKL2ONNX.sub("", word))
            plain = re.sub(r"[\W_]", "", re.sub(r"_?\d+(_\w)?$", "", word)).lower()
            if not plain or plain.isdigit() or plain in GENERIC or plain in OPERATORS | TRANSPOSED or len(word) > 40:
                continue
            if name := identifier(word):
                return name[:LONGEST].rstrip("_")
    return "h"


def _is_operator(part: str) -> bool:
    return re.sub(r"[\W_]|\d+$", "", re.sub(r"_output_\d+$|:\d+$|_\d+$", "", part)).lower() in OPERATORS


def without_numbers(name: str) -> str:
    """A name without numbers between underscores.

    >>> without_numbers("past_key_values_0_key")
    'past_key_values_key'
    """
    return re.sub(r"_\d+(?=_|$)", "", name)


class Identifiers:
    """The identifiers of one function.

    Attributes:
        of: by reference.
        reserved: identifiers that no value may have.
        is_model: whether it is the model itself, rather than one of several layers.
    """

    def __init__(self, of: dict[str, str], reserved: Iterable[str], *, is_model: bool) -> None:
        self.of, self.reserved, self.is_model = dict(of), set(reserved), is_model
        self._live: dict[str, str] = {}
        """Identifier -> the reference whose value it has."""

    def bind(self, reference: str, wanted: str, other: str = "h") -> str:
        """Give a reference an identifier: the wanted one, or one like it; another word if that is taken for good."""
        wanted = other if wanted in self.reserved else wanted
        numbered = (f"{wanted}{n}" if wanted == "h" else f"{wanted}_{n}" for n in count(2))
        name = next(n for n in chain([wanted], numbered) if n not in self._live and n not in self.reserved)
        self.take(reference, name)
        return name

    def take(self, reference: str, name: str) -> None:
        """Give a reference an identifier that nothing else has."""
        self._live[name] = reference
        self.of[reference] = name

    def release(self, references: Iterable[str]) -> None:
        """Free the identifiers of values that nothing reads any more."""
        dead = set(references)
        self._live = {n: r for n, r in self._live.items() if r not in dead}

    def text(self, reference: str) -> str:
        return self.of.get(reference, "_")


def dimension(variable: str | None, axis: int, rank: int) -> str:
    """A name for a dimension variable; exporters often have none that says anything.

    >>> dimension("batch_size", 0, 2), dimension(None, 0, 4), dimension("unk__12", 2, 4)
    ('batch_size', 'batch', 'height')
    """
    usable = variable and not re.search(r"unk_|dynamic|^none$|^\?|^\d|^n$", variable.lower())
    name = identifier(str(variable)) if usable else ""
    if 0 < len(name) <= LONGEST:
        return name
    spatial = {4: ("batch", "channels", "height", "width"), 3: ("batch", "channels", "length")}
    return "batch" if axis == 0 else spatial[rank][axis] if rank in spatial else f"extent_{axis}"


def distinct(names: Sequence[str]) -> list[str]:
    """The names, with numbers where they repeat."""
    seen = Counter[str]()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return numbered


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
        formals = distinct_unused(self.text(block.formals, names))
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
        yield " " * indent + f"def {name}({distinct_unused(self.text(block.formals, inner))}):"
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


def distinct_unused(formals: str) -> str:
    """Formals with numbers at further underscores, since Python rejects equal ones.

    >>> distinct_unused("_, x, _, x_")
    '_, x, _2, x_'
    """
    names = chain("_", (f"_{n}" for n in count(2)))
    return re.sub(r"\b_\b", lambda _: next(names), formals)


def tidy(lines: Sequence[str]) -> list[str]:
    """Lines without empty ones at the start of a block, or several in a row."""
    kept = [line for above, line in pairwise(["", *lines]) if line or (above and not above.endswith(":"))]
    return kept if kept[-1] else kept[:-1]

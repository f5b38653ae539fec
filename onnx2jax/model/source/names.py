"""Identifiers for values, from the names in the file: short, valid, and used again once a value is dead."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, count
from typing import Final

from ...ops.registry import supported
from .calls import BUILTINS, snake

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

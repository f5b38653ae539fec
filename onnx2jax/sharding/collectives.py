"""Collective operations of a compiled program, parsed from its HLO text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

KINDS: Final = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_RESULT: Final = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY: Final = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Collective:
    """A collective: its kind, as XLA names it, and the bytes of its result on one device."""

    kind: str
    bytes: int


def collectives(text: str) -> Iterator[Collective]:
    """The collectives in the HLO text of a compiled program; one in a loop body counts once.

    >>> list(collectives("%a = f32[2,8]{1,0} all-reduce(%b), channel_id=1"))
    [Collective(kind='all-reduce', bytes=64)]
    """
    for result, kind, start in _RESULT.findall(text):
        arrays = [_bytes(*found) for found in _ARRAY.findall(result)]
        # The start of an asynchronous collective returns operands before results, ((a, b), (y, z)) or (a, y, ...);
        # that of an all-reduce returns results alone.
        if start and kind != "all-reduce" and len(arrays) > 1:
            arrays = arrays[len(arrays) // 2 :] if result.startswith("((") else arrays[1:2]
        yield Collective(kind, sum(arrays))


def _bytes(dtype: str, extents: str) -> int:
    bits = 8 if dtype == "pred" else int(next(iter(re.findall(r"\d+", dtype)), 8))
    count = 1
    for n in filter(None, extents.split(",")):
        count *= int(n)
    return count * bits // 8

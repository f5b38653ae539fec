"""A Markdown table of the faults that several suites found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from .faults import Fault

SUITES: Final = ("the suite before", "make test", "make test-extended")
Results = dict[str, str | None]
"""The test that finds a fault, by the fault's name; None where none does."""


def table(faults: Sequence[Fault], suites: Sequence[Results]) -> Iterator[str]:
    """The lines of a Markdown table: what each suite found, and totals.

    >>> fault = Fault("f", "onnx2jax/ops/conv.py", "wrong axis", "", "", ())
    >>> found = {"f": "tests/ops/test_conv.py::test_it"}
    >>> list(table([fault], [found, found, {}]))[2]
    '| f | ops | wrong axis | test_conv.py::test_it | test_conv.py::test_it | - |'
    """
    yield f"| fault | room | kind | {' | '.join(SUITES)} |"
    yield f"|{'---|' * (3 + len(SUITES))}"
    for fault in faults:
        cells = " | ".join(_cell(fault, results) for results in suites)
        yield f"| {fault.name} | {fault.room} | {fault.kind} | {cells} |"
    totals = [sum(results.get(fault.name) is not None for fault in faults) for results in suites]
    yield f"| **{len(faults)} faults** | | | {' | '.join(f'**{total} found**' for total in totals)} |"


def _cell(fault: Fault, results: Results) -> str:
    if fault.name not in results:
        return "-"
    return (results[fault.name] or "*survives*").rpartition("/")[2]

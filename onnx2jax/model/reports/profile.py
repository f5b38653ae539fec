"""Profiles a model's calls by node: XLA's profile, attributed by the named scopes in which nodes are traced."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any, Final

import jax

from ... import compat
from ...errors import UnsupportedError
from ...printed import Printed
from ...proto.xspace import Instruction, Trace, read_trace
from ..changes.parts import with_graph
from .summary import MARK, mark, node_of, unmarked
from .table import scaled, table

SHOWN: Final = 25
"""Rows of a table or chart."""
HEAD: Final = ("node", "operator", "a call", "share", "with it")
CONTROL: Final = ("while", "conditional", "call")
"""Operations whose time is that of their bodies, which is recorded too."""
UNKNOWN: Final = Instruction("", "", ())
"""An operation of a program that the profile does not contain."""


@dataclass(frozen=True)
class NodeTime:
    """The time of a node.

    Attributes:
        name, operator: of the node.
        seconds: time in a call, summed over threads.
        share: share of the time in all nodes.
        fused: names of nodes that XLA fused with it, whose time is counted here.
        host: whether it runs on the host, outside compiled programs.
    """

    name: str
    operator: str
    seconds: float
    share: float
    fused: Sequence[str] = ()
    host: bool = False


@dataclass(frozen=True, repr=False)
class Profile(Printed):
    """The result of ``Model.profile``; printed as a table, shown by notebooks as a chart.

    Attributes:
        nodes: the nodes that took time, the longest first.
        operators: seconds of a call by operator, the longest first.
        call: the median time of a call without profiling, in seconds.
        other: seconds of a call in operations of no node.
        calls: number of recorded calls.
        device: the kind of device.
    """

    nodes: Sequence[NodeTime]
    operators: Mapping[str, float]
    call: float
    other: float
    calls: int
    device: str

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table, without its head."""
        for n in self.nodes:
            fused = ", ".join(n.fused[:3]) + (f" and {len(n.fused) - 3} more" if len(n.fused) > 3 else "")
            yield n.name, n.operator, duration(n.seconds), f"{n.share:.1%}", "on the host" if n.host else fused

    @property
    def total(self) -> str:
        """The sums in a line."""
        inside = sum(self.operators.values())
        return (
            f"{self.calls} calls of {duration(self.call)} on {self.device}; in nodes {duration(inside)}, summed over "
            f"threads; in operations of no node {duration(self.other)}"
        )

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        rows = list(self.rows())
        more = [f"{len(rows) - SHOWN} more nodes"] if len(rows) > SHOWN else []
        every = sum(self.operators.values()) or 1.0
        kinds = [(n, duration(s), f"{s / every:.1%}") for n, s in self.operators.items()]
        by_operator = table([("operator", "a call", "share"), *kinds])
        return "\n".join([table([HEAD, *rows[:SHOWN]], width=120), *more, "", by_operator, "", self.total])

    def _repr_html_(self) -> str:
        nodes = [(f"{n.name} ({n.operator})", n.seconds) for n in self.nodes[:SHOWN]]
        charts = (_bars("nodes", nodes), _bars("operators", [*self.operators.items()][:SHOWN]))
        return f"<div>{''.join(charts)}<p>{escape(self.total)}</p></div>"


def duration(seconds: float) -> str:
    """A duration with three significant digits.

    >>> duration(0.0001234), duration(0.0256), duration(12.5)
    ('123 us', '25.6 ms', '12.5 s')
    """
    return scaled(seconds * 1e6, (" us", " ms", " s"))


def _bars(title: str, values: Sequence[tuple[str, float]]) -> str:
    """A horizontal bar chart as SVG: names on the left, durations on the right."""
    most = max((s for _, s in values), default=0) or 1.0
    parts = [f"<text x='0' y='14' font-weight='bold'>{title}</text>"]
    for i, (name, seconds) in enumerate(values):
        y, long = 22 + 20 * i, 400 * seconds / most
        shown = name if len(name) <= 44 else f"…{name[-43:]}"
        parts.append(
            f"<g><title>{escape(name)}</title><text x='300' y='{y + 13}' text-anchor='end'>{escape(shown)}</text>"
            f"<rect x='308' y='{y}' width='{long:.1f}' height='16' fill='#5b7bc4'/>"
            f"<text x='{314 + long:.1f}' y='{y + 13}'>{duration(seconds)}</text></g>"
        )
    height = 30 + 20 * len(values)
    style = "font-family='ui-monospace,monospace' font-size='12' fill='currentColor'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' width='800' height='{height}' {style}>{''.join(parts)}</svg>"


def profile(model: Any, args: Sequence[Any], named: Mapping[str, Any], rng: Any, calls: int) -> Profile:
    """See ``Model.profile``."""
    if calls < 1:
        raise ValueError(f"calls is {calls}; it must be at least 1")
    # Nodes are named by position, to find them in scopes; the weights on devices are the model's.
    options = {"bucket": model.spec.bucket, "max_size": model.spec.max_size}
    marked = with_graph(model, mark(model.graph), settings=replace(model.settings, annotate=True), **options)
    marked._runtime.share_params(model._runtime)

    def call() -> None:
        jax.block_until_ready(marked(*args, rng=rng, **named))

    with unmarked(model.graph):
        call()
    call()  # a program's first run is slower
    whole = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        whole.append(time.perf_counter() - start)
    with compat.profiled() as written:
        for _ in range(calls):
            call()
    spent: Any = Counter()
    fused, host = defaultdict[Any, set[int]](set), set[Any]()
    for data in written:
        for owner, seconds, others, is_host in _spent(read_trace(data, MARK)):
            spent[owner] += seconds
            fused[owner].update(others)
            host |= {owner} if is_host else set()
    other = spent.pop(None, 0.0)
    if not spent:
        raise UnsupportedError(
            f"XLA's profile of {calls} calls names no node of the model: nothing was computed (the outputs may be "
            "constants), or this JAX has no profiler for its device"
        )
    nodes, every = model.graph.nodes, sum(spent.values())
    operators: Any = Counter()
    rows = []
    for i, seconds in spent.most_common():
        node, names = nodes[i], [nodes[k].name for k in sorted(fused[i] - {i})]
        rows.append(NodeTime(node.name, node.op_type, seconds / calls, seconds / every, names, i in host))
        operators[node.op_type] += seconds / calls
    device = jax.devices()[0].device_kind
    return Profile(rows, dict(operators.most_common()), statistics.median(whole), other / calls, calls, device)


def _spent(trace: Trace) -> Iterator[tuple[int | None, float, Sequence[int], bool]]:
    """For each operation the node by position, None if it is of none; seconds; nodes fused; whether on the host."""
    on_host = [(node_of(name), start, end) for name, start, end in trace.named]
    yield from ((i, end - start, (), True) for i, start, end in on_host if i is not None)
    seen = {(r.program, r.name) for r in trace.executions}
    owners = {p: {n: node_of(i.scope) for n, i in every.items()} for p, every in trace.programs.items()}
    for run in trace.executions:
        instruction = trace.programs.get(run.program, {}).get(run.name, UNKNOWN)
        if instruction.opcode in CONTROL and any((run.program, n) in seen for n in instruction.inside):
            continue
        nodes = owners.get(run.program, {})
        fused = [i for n in instruction.inside if (i := nodes.get(n)) is not None]
        owner = nodes.get(run.name)
        owner = fused[-1] if owner is None and fused else owner
        if owner is not None or not any(start <= run.start <= end for _, start, end in on_host):  # else of a host node
            yield owner, run.end - run.start, fused, False

"""Background compilation: calls are evaluated in NumPy, node by node, while a thread compiles their program.

Compilation starts after the second call of a signature, so a process that makes one call compiles nothing; and not
before it, because tracing holds the interpreter lock: beside it a call of 40 ms takes 800. The first call of a
classifier of text lines takes 40 ms rather than 1.9 s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import Any, Final

import jax

from ..eval.interpreter import Context, Scope, initial_scope, run_node, run_nodes
from ..eval.values import to_host
from ..ir.graph import Graph, Node
from ..progress import hidden

WAIT_SECONDS: Final = 2.0
"""Seconds that a first call is evaluated before compilation starts beside it."""
MOST_IN_XLA: Final = 0.3
"""Seconds in operators without NumPy implementation, each of which XLA compiles, after which a call is compiled."""


class Background:
    """The compilations of one model's calls, by signature."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._calls: dict[Hashable, _Compilation] = {}

    def evaluated(
        self, key: Hashable, graph: Graph, values: Mapping[str, Any], context: Context, compiled: Callable[[], Any]
    ) -> tuple[Any, ...] | None:
        """The outputs of a call, evaluated in NumPy; None if the call's program is compiled, or has to be.

        Args:
            key: the call's signature.
            graph: what to evaluate.
            values: its inputs, as NumPy arrays.
            context: of the evaluation, whose parameters are NumPy arrays.
            compiled: makes the call by its program. Runs in another thread.
        """
        with self._lock:
            is_first = key not in self._calls
            call = self._calls.setdefault(key, _Compilation())
        if call.is_over:
            return None
        try:
            results = _evaluated(graph, values, context, call, compiled)
        except Exception:  # the compiled call raises it again, or needs no operator that did
            call.is_over = True
            return None
        if not is_first:
            call.start(compiled)
        return results

    def is_over(self, key: Hashable) -> bool | None:
        """Whether a signature's calls run its program; None if there was no call yet."""
        call = self._calls.get(key)
        return None if call is None else call.is_over

    def wait(self, key: Hashable) -> None:
        """Leave a signature's calls to the caller's thread."""
        with self._lock:
            self._calls.setdefault(key, _Compilation()).is_over = True


class _Compilation:
    """The compilation of one signature.

    Attributes:
        is_over: whether calls run their program, compiled by now or by the next of them.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._lock, self._started_in = Lock(), 0

    def start(self, compiled: Callable[[], Any]) -> None:
        """Have the program compiled in another thread, unless this process has started that; a fork has no threads."""

        def run() -> None:
            try:
                with hidden():
                    compiled()
            finally:  # what it raised, the next call raises
                self.is_over = True

        with self._lock:
            if self._started_in != os.getpid() and not self.is_over:
                self._started_in = os.getpid()
                _thread(self._started_in).submit(run)


@cache
def _thread(process: int) -> ThreadPoolExecutor:  # noqa: ARG001
    """One thread for all models; a process ends when it is done."""
    return ThreadPoolExecutor(1, "onnx2jax-compile")


def _evaluated(
    graph: Graph, values: Mapping[str, Any], context: Context, call: _Compilation, compiled: Callable[[], Any]
) -> tuple[Any, ...] | None:
    """The graph's outputs; None as soon as the program is compiled, or if too many operators need XLA."""
    last = {name: node for node in graph.nodes for name in node.reads}
    kept, in_xla, start = {v.name for v in graph.outputs}, 0.0, time.perf_counter()

    def run(node: Node, scope: Scope, context: Context) -> Sequence[Any]:
        nonlocal in_xla
        before = time.perf_counter()
        results = run_node(node, scope, context)
        now = time.perf_counter()
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(results)):
            results, in_xla = list(map(to_host, results)), in_xla + now - before
            call.is_over |= in_xla > MOST_IN_XLA
        if call.is_over:
            raise _Over
        if now - start > WAIT_SECONDS:
            call.start(compiled)
        for name in node.reads:
            if last[name] is node and name not in kept:
                scope.pop(name, None)
        return results

    scope: Scope = initial_scope(graph, values, context)
    try:
        run_nodes(graph.nodes, scope, context.within(graph), run)
    except _Over:
        return None
    return tuple(scope[v.name] for v in graph.outputs)


class _Over(Exception):
    """The program is compiled, or has to be."""

"""Says what takes more than two seconds, with the elapsed time: on a terminal, or in a notebook, on standard error.

Nothing is written where standard error is neither, as in a log. ONNX2JAX_QUIET=1 turns it off; ONNX2JAX_DEBUG, which
prints lines of its own there, does too. One thread draws while stages are open, and ends with the last of them.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

DELAY = 2.0
"""Seconds after which a stage is shown."""
PERIOD = 0.5
"""Seconds between looks at the open stages."""


class _Stage:
    """Something that may take long.

    Attributes:
        text: what it is.
        start: when it began.
        drawn: whether it has been shown.
    """

    def __init__(self, text: str) -> None:
        self.text, self.start, self.drawn = text, time.monotonic(), False

    def __str__(self) -> str:
        return f"onnx2jax: {self.text} ({time.monotonic() - self.start:.0f} s)"


class _Display(threading.Thread):
    """Draws the latest stage that takes long, on one line."""

    def __init__(self) -> None:
        super().__init__(name="onnx2jax progress", daemon=True)
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(PERIOD):
            with _lock:
                if not self.ended.is_set():
                    _draw()


_lock = threading.RLock()
_stages: list[_Stage] = []
_display: _Display | None = None
_width = 0
"""Characters of the line on the screen."""
_QUIET: Final = ("ONNX2JAX_QUIET", "ONNX2JAX_DEBUG")
"""Variables of the environment that hide stages, unless they are 0 or empty."""
_local = threading.local()
"""Of each thread: ``stages`` that the innermost call has announced, and whether they are ``hidden``."""


@contextmanager
def stage(text: str) -> Iterator[None]:
    """A context in which something may take long; shown after two seconds. Stages may be nested, and in any thread.

    >>> with stage("compiling"):
    ...     pass
    """
    entered = _entered(text)
    try:
        yield
    finally:
        if entered is not None:
            _leave(entered)


@contextmanager
def call() -> Iterator[None]:
    """A call that may compile a program: ``announce`` inside, while JAX traces, begins a stage that ends with it.

    Entering a stage starts a thread; this costs a microsecond.
    """
    outer, _local.stages = getattr(_local, "stages", None), []
    try:
        yield
    finally:
        announced, _local.stages = _local.stages, outer
        for entered in announced:
            _leave(entered)


def announce(text: str) -> None:
    """Begins a stage that ends with the innermost ``call`` of this thread; does nothing outside of one."""
    announced: list[_Stage] | None = getattr(_local, "stages", None)
    if announced is not None and (entered := _entered(text)) is not None:
        announced.append(entered)


def erase() -> None:
    """Removes the line from a terminal, where something is to be printed; it is drawn again below that."""
    with _lock:
        if _is_terminal():
            _clear()


@contextmanager
def hidden() -> Iterator[None]:
    """A context that shows no stages of this thread: something else is drawn, or nobody waits for it."""
    outer, _local.hidden = getattr(_local, "hidden", False), True
    try:
        yield
    finally:
        _local.hidden = outer


def _entered(text: str) -> _Stage | None:
    """A new stage; None where nothing is to be shown."""
    global _display
    is_hidden = getattr(_local, "hidden", False) or {os.environ.get(name, "0") for name in _QUIET} - {"", "0"}
    if is_hidden or not (_is_terminal() or _in_notebook()):
        return None
    entered = _Stage(text)
    with _lock:
        _stages.append(entered)
        if _display is None:
            _display = _Display()
            try:
                _display.start()
            except RuntimeError:  # the interpreter ends, or there are too many threads
                _display = None
    return entered


def _leave(entered: _Stage) -> None:
    global _display
    ended = None
    with _lock:
        if entered in _stages:  # not after a fork
            _stages.remove(entered)
        if entered.drawn:
            _clear(str(entered))
        if not _stages and _display is not None:
            ended, _display = _display, None
            ended.ended.set()
    if ended is not None:
        ended.join(1)


def _is_terminal() -> bool:
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _in_notebook() -> bool:
    """Whether this is the kernel of a notebook; importing nothing for that."""
    get_shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and hasattr(get_shell(), "kernel")


def _draw() -> None:
    global _width
    long = [s for s in _stages if time.monotonic() - s.start >= DELAY]
    if long:
        long[-1].drawn = True
        line = str(long[-1])[: max(20, shutil.get_terminal_size().columns - 1)]
        _write(f"\r{line.ljust(_width)}")
        _width = len(line)


def _clear(record: str = "") -> None:
    """Removes the line from a terminal; in a notebook a record of what took long replaces it."""
    global _width
    if _width:
        _write(f"\r{' ' * _width}\r" if _is_terminal() else f"\r{record.ljust(_width)}\n")
    _width = 0


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # it is closed
        sys.stderr.write(text)
        sys.stderr.flush()


def _stop() -> None:
    """Leaves all stages, and with the last of them ends the thread, before the interpreter does."""
    for entered in tuple(_stages):
        _leave(entered)


def _after_fork() -> None:
    """In a child process the thread does not exist, and the lock may be held for ever."""
    global _lock, _display, _width
    _lock, _display, _width = threading.RLock(), None, 0
    _stages.clear()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

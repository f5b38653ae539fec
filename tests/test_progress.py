"""Messages about what takes long: on a terminal and in a notebook, and nowhere else."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

import onnx2jax
from onnx2jax import progress


class Screen(io.StringIO):
    """Standard error that is a terminal, or not."""

    terminal = True

    def isatty(self) -> bool:
        return super().isatty() or self.terminal  # raises if it is closed

    def shows(self, text: str) -> bool:
        """Whether a text appears, soon."""
        for _ in range(1000):
            if text in self.getvalue():
                return True
            time.sleep(0.01)
        return False


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    screen = Screen()
    monkeypatch.setattr(
        progress, "sys", SimpleNamespace(stderr=screen, modules=sys.modules)
    )  # pytest replaces sys.stderr
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "PERIOD", 0.01)
    monkeypatch.delenv("ONNX2JAX_QUIET", raising=False)
    monkeypatch.delenv("ONNX2JAX_DEBUG", raising=False)
    yield screen
    assert not [t for t in threading.enumerate() if t.name == "onnx2jax progress"]


def test_a_stage_is_drawn_on_a_terminal_and_removed(screen: Screen) -> None:
    with progress.stage("loading"):
        assert screen.shows("\ronnx2jax: loading (0 s)")
        with pytest.raises(KeyError), progress.stage("compiling"):
            assert screen.shows("\ronnx2jax: compiling (0 s)")
            raise KeyError
    assert screen.getvalue().rpartition("\r")[2] == ""


def test_a_line_is_erased_before_something_else_is_printed(screen: Screen) -> None:
    with progress.stage("loading"):
        assert screen.shows("loading")
        with progress._lock:
            progress.erase()
            screen.write("warning")
        assert screen.shows("\rwarning\ronnx2jax: loading")


def test_nothing_is_drawn_before_the_delay(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 3600.0)
    with progress.stage("loading"):
        pass
    assert screen.getvalue() == ""


@pytest.mark.parametrize("how", ["log", "ONNX2JAX_QUIET", "ONNX2JAX_DEBUG", "closed", "none"])
def test_no_thread_where_nothing_is_shown(how: str, screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "log":
        screen.terminal = False
    elif how == "closed":
        screen.close()
    elif how == "none":
        monkeypatch.setattr(progress.sys, "stderr", None)
    else:
        monkeypatch.setenv(how, "1")
    with progress.stage("loading"):
        assert progress._display is None


def test_a_notebook_keeps_the_line(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    screen.terminal = False
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    with progress.stage("loading"):
        assert screen.shows("loading")
    assert screen.getvalue().endswith("onnx2jax: loading (0 s)\n")


def test_a_stage_announced_while_tracing_ends_with_the_call(screen: Screen) -> None:
    progress.announce("outside of a call")
    with progress.call():
        progress.announce("compiling")
        assert screen.shows("compiling")
    assert progress._stages == []
    assert "outside" not in screen.getvalue()


def test_hidden_behind_another_display(screen: Screen) -> None:
    with progress.hidden(), progress.stage("loading"):
        time.sleep(0.05)
    assert screen.getvalue() == ""


def test_stages_of_several_threads(screen: Screen) -> None:
    def work() -> None:
        for _ in range(20):
            with progress.stage("one"), progress.stage("two"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress._stages == []
    assert screen.getvalue().rpartition("\r")[2] == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_inside_of_a_stage(screen: Screen) -> None:
    with progress.stage("loading"):
        if (child := os.fork()) == 0:
            with progress.stage("in the child"):
                os._exit(0 if screen.shows("in the child") else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_conversion_and_compilation_are_shown(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    enter = progress._entered
    monkeypatch.setattr(progress, "_entered", lambda text: (begun.append(text), enter(text))[1])
    model = onnx2jax.convert(onnx2jax.demo_model())
    image = np.zeros((1, 1, 8, 8), np.float32)
    model(image)
    assert begun == ["converting digits.onnx", "compiling 'digits'", "tracing digits", "precomputing weights of digits"]
    begun.clear()
    model(image)
    assert begun == []
    assert screen.getvalue().rpartition("\r")[2] == ""

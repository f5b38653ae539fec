"""ONNX2JAX_DEBUG: its level, and output to stderr."""

from __future__ import annotations

import pytest

from onnx2jax import debug


@pytest.mark.parametrize(("text", "level"), [("3", 3), ("0", 0), ("", 0), ("on", 0), ("-1", 0), (None, 0)])
def test_level_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, text: str | None, level: int) -> None:
    monkeypatch.delenv(debug.VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(debug.VARIABLE, text)
    assert debug.level() == level


def test_text_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    debug.emit("Relu: 1 of 2")
    assert capsys.readouterr() == ("", "onnx2jax: Relu: 1 of 2\n")

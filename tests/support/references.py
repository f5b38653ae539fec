"""What onnxruntime and onnx.reference give for a model: in a process of their own, which a crash or a hang ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import onnx
from onnx import helper

NAMES = "onnxruntime", "onnx.reference"
SECONDS = 20
"""The most that one reference may take for a model."""
Answer = list[Any] | str
"""Outputs, or why there are none."""


class References:
    """Both references in one process, which is started again where a model has ended it. Closed as a context."""

    def __init__(self) -> None:
        self._connection: Connection | None = None

    def __enter__(self) -> References:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def answers(self, proto: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Answer]:
        """The outputs of each reference by its name, or a text that says why there are none."""
        return {name: self._answer(name, proto, feeds) for name in NAMES}

    def _answer(self, name: str, proto: onnx.ModelProto, feeds: Mapping[str, Any]) -> Answer:
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send((name, proto.SerializeToString(), dict(feeds)))
            if self._connection.poll(SECONDS):
                answer: Answer = self._connection.recv()
                return answer
            reason = f"took more than {SECONDS} seconds"
        except (EOFError, ConnectionError):
            reason = "ended the process"
        self._end()
        return reason

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._connection = None


def _serve(connection: Connection) -> None:
    """Answers requests until the other end is closed."""
    os.environ["ALLOW_RELEASED_ONNX_OPSET_ONLY"] = "0"
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    runs: dict[str, Callable[[bytes, dict[str, Any]], list[Any]]] = dict(
        zip(NAMES, (_onnxruntime, _reference), strict=True)
    )
    with contextlib.suppress(EOFError):
        while True:
            name, model, feeds = connection.recv()
            try:
                answer: Answer = runs[name](model, feeds)
            except Exception as error:  # of any kind: that it refuses is the answer
                answer = f"{type(error).__name__}: {error}"
            connection.send(answer)


def _onnxruntime(model: bytes, feeds: dict[str, Any]) -> list[Any]:
    """On a CPU, without its optimisations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return [_typed(x, end.type) for x, end in zip(session.run(None, feeds), session.get_outputs(), strict=True)]


def _typed(x: Any, name: str) -> Any:
    """A tensor of a short type, which onnxruntime returns as bytes, in that type."""
    if not name.startswith("tensor(float8"):
        return x
    code = onnx.TensorProto.DataType.Value(name[len("tensor(") : -1].upper())
    return x.view(helper.tensor_dtype_to_np_dtype(code))


def _reference(model: bytes, feeds: dict[str, Any]) -> list[Any]:
    from onnx.reference import ReferenceEvaluator

    return list(ReferenceEvaluator(onnx.ModelProto.FromString(model)).run(None, feeds))

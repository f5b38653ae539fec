"""The server of docs/guides/serve.md, started by uvicorn in a thread and asked over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import threading
import types
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from benchmarks.serve import load, sample
from onnx2jax.data import demo_model, demo_samples
from onnx2jax.proto.types import TensorType
from tests.support import pages
from tests.support.helpers import ROOT

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

IMAGES = demo_samples()["images"]
WAITING = 5
pytestmark = pytest.mark.usefixtures("standard_promotion")  # other threads have JAX's default


class Server:
    """The page's file, listening; ``run`` waits while ``gate`` is closed, and notes the size of each batch."""

    def __init__(self) -> None:
        code = next(b for b in pages.blocks(ROOT / "docs" / "guides" / "serve.md") if b.kind == "python").body
        assert "\nWAITING = 64 " in code
        self.module = types.ModuleType("server")
        exec(compile(code.replace("WAITING = 64 ", f"WAITING = {WAITING} "), "server.py", "exec"), vars(self.module))
        self.compiled = self.module.model.compilations
        self.gate, self.entered = threading.Event(), threading.Semaphore(0)
        self.batches: list[int] = []
        self.gate.set()
        self.module.run = self.run  # type: ignore[attr-defined]
        self.server = uvicorn.Server(uvicorn.Config(self.module.app, port=0, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run)
        self.clients = ThreadPoolExecutor(16)

    def run(self, names: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        self.entered.release()
        assert self.gate.wait(60)
        self.batches.append(len(feeds.get("image", ())))
        return self.module.model.run(names, feeds)

    @property
    def port(self) -> int:
        return self.server.servers[0].sockets[0].getsockname()[1]

    def start(self) -> None:
        self.thread.start()
        wait_until(lambda: self.server.started)

    def ask(self, inputs: Any, path: str = "/predict") -> tuple[int, Any]:
        """The status and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = None if inputs is None else json.dumps(inputs)
        connection.request("GET" if inputs is None else "POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        result = answer.status, json.loads(answer.read())
        connection.close()
        return result

    def send(self, *inputs: Any) -> list[Future[tuple[int, Any]]]:
        """Answers to come; returns when all requests wait in the queue."""
        before = self.module.queue.qsize()
        answers = [self.clients.submit(self.ask, feeds) for feeds in inputs]
        wait_until(lambda: self.module.queue.qsize() == before + len(inputs))
        return answers

    def block(self) -> Future[tuple[int, Any]]:
        """Close the gate behind one request, so that further ones stay in the queue."""
        self.gate.clear()
        self.entered = threading.Semaphore(0)
        first = self.clients.submit(self.ask, request(0))
        assert self.entered.acquire(timeout=60)
        self.batches.clear()
        return first


def wait_until(holds: Any) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError("not within a minute")


def request(i: int) -> dict[str, Any]:
    return {"image": IMAGES[i].tolist()}


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    server = Server()
    server.start()
    yield server
    server.gate.set()
    server.server.should_exit = True
    server.thread.join(60)


@pytest.fixture
def server(started: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server, in which no request is out of time."""
    monkeypatch.setattr(started.module, "SECONDS", 600.0)
    yield started
    started.gate.set()


def test_concurrent_requests_share_a_call_and_none_compiles(server: Server) -> None:
    first = server.block()
    answers = [first, *server.send(*map(request, range(1, 6)))]
    server.gate.set()
    expected = server.module.model.run(None, {"image": IMAGES[:6]})[0]
    for i, answer in enumerate(answers):
        status, outputs = answer.result(60)
        assert status == 200
        np.testing.assert_allclose(outputs["logits"], expected[i], rtol=1e-4, atol=1e-4)
    assert server.batches == [1, 5]
    assert server.compiled == len(server.module.SIZES)
    assert server.ask(None, "/health") == (200, {"waiting": 0, "compilations": server.compiled})


def test_a_full_queue_is_503_and_what_waits_is_answered(server: Server) -> None:
    first = server.block()
    waiting = server.send(*[request(1)] * WAITING)
    assert server.ask(request(1)) == (503, {"detail": f"{WAITING} requests wait"})
    server.gate.set()
    assert [answer.result(60)[0] for answer in (first, *waiting)] == [200] * (1 + WAITING)


def test_a_request_out_of_time_is_504_and_not_evaluated(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    first = server.block()
    monkeypatch.setattr(server.module, "SECONDS", 0.01)
    assert server.ask(request(1)) == (504, {"detail": "no answer within 0.01 s"})
    monkeypatch.setattr(server.module, "SECONDS", 600.0)
    (last,) = server.send(request(2))
    server.gate.set()
    assert first.result(60)[0] == last.result(60)[0] == 200
    assert server.batches == [1, 1]


def test_wrong_inputs_are_422_and_leave_the_others_alone(server: Server) -> None:
    first = server.block()
    (right,) = server.send(request(1))
    wrong = {
        "a sample of image has the shape (1, 8, 8), not (1, 8, 9)": {"image": [[[0.0] * 9] * 8]},
        "a sample of image has the shape (1, 8, 8), not ()": {"image": 1},
        "image takes float32, which this is not: ['a']": {"image": ["a"]},
        "image takes float32, which this is not: None": {"image": None},
        "image has lists of different lengths": {"image": [[1], [1, 2]]},
        "image has a number beyond float32": {"image": [[[1e39] * 8] * 8]},
        "the inputs are ['image']; given: ['imag']": {"imag": 1},
        "the inputs are ['image']; given: []": {},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none in the server's log
        assert {reason: server.ask(inputs) for reason, inputs in wrong.items()} == {
            reason: (422, {"detail": reason}) for reason in wrong
        }  # before they wait
    assert server.ask([1])[0] == 422
    server.gate.set()
    assert first.result(60)[0] == right.result(60)[0] == 200
    assert server.module.model.compilations == server.compiled


def test_an_error_of_the_model_concerns_its_own_group(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.module, "to_sample", lambda inputs: {n: np.float32(v) for n, v in inputs.items()})
    first = server.block()
    right, wrong = server.send(request(1), {"image": [[[0.0] * 9] * 8]})
    server.gate.set()
    assert first.result(60)[0] == right.result(60)[0] == 200
    status, body = wrong.result(60)
    assert status == 422 and "extent 8 on axis 3" in body["detail"]


def test_outputs_that_json_cannot_hold_are_422(server: Server) -> None:
    first = server.block()
    answers = server.send({"image": [[[float("nan")] * 8] * 8]}, request(1))
    server.gate.set()
    (status, body), right = (answer.result(60) for answer in answers)
    assert (status, body["detail"]) == (422, "output 'logits' is not finite for this sample")
    assert first.result(60)[0] == right[0] == 200 and server.batches[-1] == 2


def test_bodies_that_are_no_npz_files_are_refused() -> None:
    code = next(b.body for b in pages.blocks(ROOT / "docs" / "guides" / "serve.md") if "def read_arrays" in b.body)
    names: dict[str, Any] = {"np": np}
    exec(code, names)
    whole, array = io.BytesIO(), io.BytesIO()
    np.savez(whole, image=IMAGES[0])
    np.save(array, IMAGES[0])
    np.testing.assert_array_equal(names["read_arrays"](whole.getvalue())["image"], IMAGES[0])
    for body in (b"", b"{}", array.getvalue(), whole.getvalue()[:-30]):
        with pytest.raises(ValueError, match="the body is not a readable"):
            names["read_arrays"](body)


def test_decimals_are_not_cast_to_integers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    to_array = server.module.to_array
    kinds = {np.dtype(n) for n in ("float32", "int64", "uint8", "bool", "object")}
    monkeypatch.setattr(server.module, "declared", {str(t): TensorType(t, ("batch", "n")) for t in kinds})
    assert to_array("float32", [1, 2]).dtype == np.float32 == to_array("float32", [0.5]).dtype
    assert to_array("uint8", [255]).dtype == np.uint8
    assert to_array("bool", [True]).dtype == np.bool_
    assert to_array("object", ["a"]).dtype.kind == "U"  # which the model takes as strings
    for name, value in {"int64": [0.5], "float32": [True], "uint8": [256], "object": [1], "bool": [1]}.items():
        with pytest.raises(ValueError, match=r"takes|beyond"):
            to_array(name, value)


def test_the_load_test_waits_for_every_answer(server: Server) -> None:
    server.batches.clear()
    asyncio.run(load(server.port, sample(demo_model()), clients=2, count=3))
    assert sum(server.batches) == 6


def test_shutdown_answers_what_waits() -> None:
    server = Server()
    server.start()
    first = server.block()
    (last,) = server.send(request(1))
    server.server.should_exit = True
    wait_until(lambda: not server.server.servers[0].is_serving())
    server.gate.set()
    assert first.result(60)[0] == last.result(60)[0] == 200
    server.thread.join(60)
    assert not server.thread.is_alive()

"""Load test of the server in docs/guides/serve.md: ``python -m benchmarks.serve``.

The page's file runs under uvicorn in a process of its own, once with ``run`` of onnx2jax and once with onnxruntime's,
and everything else equal. Clients send one sample at a time over a kept connection, from this process. The table has
requests per second and the 99th percentile of latency, the median of some rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import helper

import onnx2jax
from benchmarks.net import Net

PAGE: Final = Path(__file__).parents[1] / "docs" / "guides" / "serve.md"
WITH_ONNXRUNTIME: Final = """
import onnxruntime, server
session = onnxruntime.InferenceSession(server.path)
server.run, app = session.run, server.app
"""
APPS: Final = {"onnx2jax": "server:app", "onnxruntime": "other:app"}
SECONDS_TO_START: Final = 300


def wide(folder: Path) -> Path:
    """Seven dense layers of width 1024: 5 million weights, and inputs small enough for JSON."""
    net = Net(17, ir=8, as_inputs=False)
    x = net.input("x", ["batch", 64])
    for before, after in [(64, 1024), *[(1024, 1024)] * 5]:
        x = net("Relu", net.dense(x, before, after))
    graph = net.graph({(y := net.dense(x, 1024, 10)): np.float32})
    graph.output[0].CopyFrom(helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, ["batch", 10]))
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def sample(path: Path) -> bytes:
    """A request for a model: random numbers for one sample, as HTTP."""
    rng = np.random.default_rng(0)
    inputs = {}
    for info in onnx2jax.convert(path).inputs:
        extents = (info.shape or ())[1:]
        if not all(isinstance(extent, int) for extent in extents):
            raise SystemExit(f"{path}: input {info} has free dimensions beside its batch; fix them in the file")
        inputs[info.name] = rng.random(extents).astype(info.type.dtype).tolist()  # type: ignore[union-attr, arg-type]
    body = json.dumps(inputs).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: local\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@contextmanager
def served(app: str, folder: Path, model: Path) -> Iterator[int]:
    """The port of a server process, which is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = os.pathsep.join([str(PAGE.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"MODEL": str(model), "PYTHONPATH": places}
    command = [sys.executable, "-m", "uvicorn", app, "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command, cwd=folder, env=environment)
    try:
        for _ in range(10 * SECONDS_TO_START):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            except OSError:
                if server.poll() is not None:
                    raise SystemExit(f"{app} ended with status {server.returncode}") from None
                time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait()


async def client(port: int, request: bytes, count: int) -> list[float]:
    """Seconds of each of some requests in turn."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        seconds.append(time.perf_counter() - start)
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{head.splitlines()[0].decode()}: {body.decode()}")
    writer.close()
    return seconds


async def load(port: int, request: bytes, clients: int, count: int) -> tuple[float, float]:
    """Requests per second, and the 99th percentile of latency in seconds, of some clients at a time."""
    start = time.perf_counter()
    seconds = await asyncio.gather(*(client(port, request, count) for _ in range(clients)))
    return clients * count / (time.perf_counter() - start), float(np.quantile(np.concatenate(seconds), 0.99))


def measure(name: str, path: Path, clients: list[int], requests: int, rounds: int) -> None:
    """Print a row for each number of clients."""
    request = sample(path)
    code = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert code is not None
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "server.py").write_text(code[1], encoding="utf-8")
        (folder / "other.py").write_text(WITH_ONNXRUNTIME, encoding="utf-8")
        found: dict[tuple[str, int], tuple[float, float]] = {}
        for runtime, app in APPS.items():
            with served(app, folder, path) as port:
                for n in clients:
                    count = max(1, requests // n)
                    asyncio.run(load(port, request, n, count))  # not counted
                    runs = [asyncio.run(load(port, request, n, count)) for _ in range(rounds)]
                    found[runtime, n] = statistics.median(r for r, _ in runs), statistics.median(p for _, p in runs)
    for n in clients:
        cells = [f"{found[r, n][0]:.0f}" for r in APPS] + [f"{1e3 * found[r, n][1]:.1f}" for r in APPS]
        print(f"| {name} | {n} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", type=Path, help="ONNX files whose only free dimension is called batch")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=2000, help="of all clients together, in a round")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        models = {path.stem: path.resolve() for path in given.models}
        models = models or {"digits": onnx2jax.demo_model(), "dense, 5 million weights": wide(Path(place))}
        print("| model | clients | " + " | ".join(f"{r}, requests/s" for r in APPS), end=" | ")
        print(" | ".join(f"{r}, p99 ms" for r in APPS) + f" |\n{'|---' * (2 + 2 * len(APPS))}|", flush=True)
        for name, path in models.items():
            measure(name, path, given.clients, given.requests, given.rounds)


if __name__ == "__main__":
    main()

"""Malicious files: each is handled in little time and 500 MB, and nothing outside its folder is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import SparseTensorProto, TensorProto, helper

from tests.support.cases import MAIN, RELU, parse
from tests.support.helpers import ROOT

SECONDS, MEGABYTES = 15, 500
"""Processor time, independent of the machine's load: twenty times that of the costliest attack."""
L = '\n<domain: "l", opset_import: ["" : 21, "l" : 1]> '
CALL = MAIN + " { y = l.f (x) }"
MANY = 10_000

Attack = Callable[[Path], bytes]
ATTACKS: dict[str, tuple[str, Attack]] = {}
"""Name -> the error that convert raises, and a function that writes the folder and returns the model's bytes."""


def attack(name: str, answer: str = "ModelError") -> Callable[[Attack], Attack]:
    def register(make: Attack) -> Attack:
        ATTACKS[name] = answer, make
        return make

    return register


def with_weight(text: str = RELU, **fields: Any) -> bytes:
    tensor = TensorProto(**{"name": "w", "data_type": 1, "dims": [2]} | fields)
    return parse(text, lambda m: m.graph.initializer.append(tensor)).SerializeToString()


def external(location: str = "w.bin", dims: Any = (2,), **entries: str) -> bytes:
    tensor = TensorProto(name="w", data_type=1, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in ({"location": location} | entries).items():
        tensor.external_data.add(key=key, value=value)
    return parse(RELU, lambda m: m.graph.initializer.append(tensor)).SerializeToString()


def outside(folder: Path) -> Path:
    """A secret next to the folder."""
    path = folder.parent / "secret.bin"
    path.write_bytes(bytes(8))
    return path


# ---------------------------------------------------------------------------------------- paths and links

for _name, _location in {
    "absolute path": "/etc/passwd",
    "path above": "../secret.bin",
    "path down and above": "sub/../../secret.bin",
    "backslashes": "..\\secret.bin",
    "path with a zero byte": "w.bin\0.txt",
    "path to a process": "/proc/self/mem",
}.items():
    attack(_name, "ExternalDataError")(lambda folder, at=_location: (outside(folder), external(at))[1])


attack("path longer than any file system takes", "ExternalDataNotFoundError")(lambda _: external("a" * 100_000))


@attack("link to a file outside", "ExternalDataError")
def _(folder: Path) -> bytes:
    (folder / "w.bin").symlink_to(outside(folder))
    return external()


@attack("link to a folder outside", "ExternalDataError")
def _(folder: Path) -> bytes:
    (folder / "sub").symlink_to(outside(folder).parent, target_is_directory=True)
    return external("sub/secret.bin")


@attack("link to itself", "ExternalDataNotFoundError")
def _(folder: Path) -> bytes:
    (folder / "w.bin").symlink_to(folder / "w.bin")
    return external()


@attack("link to a device", "ExternalDataError")
def _(folder: Path) -> bytes:
    (folder / "w.bin").symlink_to("/dev/zero")
    return external()


@attack("hard link to a file outside", "ExternalDataError")
def _(folder: Path) -> bytes:
    os.link(outside(folder), folder / "w.bin")
    return external()


@attack("fifo that nobody writes to", "ExternalDataError")
def _(folder: Path) -> bytes:
    os.mkfifo(folder / "w.bin")
    return external()


@attack("folder instead of a file", "ExternalDataError")
def _(folder: Path) -> bytes:
    (folder / "w.bin").mkdir()
    return external()


# -------------------------------------------------------------------------------------- bounds and headers

for _name, _entries in {
    "offset beyond the file": {"offset": "1000000"},
    "offset beyond 64 bits": {"offset": "9" * 4000},
    "length beyond the file": {"length": str(2**60)},
}.items():

    def _bounds(folder: Path, entries: dict[str, str] = _entries) -> bytes:
        (folder / "w.bin").write_bytes(bytes(8))
        return external(**entries)

    attack(_name, "ExternalDataError")(_bounds)


@attack("terabytes in a small file", "ExternalDataError")
def _(folder: Path) -> bytes:
    (folder / "w.bin").write_bytes(bytes(8))
    return external(dims=[2**20, 2**20])


attack("extents that overflow")(lambda _: with_weight(dims=[2**62, 4], raw_data=bytes(8)))
attack("extents without data")(lambda _: with_weight(dims=[2**40]))
attack("extents of strings without data")(lambda _: with_weight(dims=[2**40], data_type=8))
attack("a million extents")(lambda _: with_weight(dims=[2] * 1_000_000))
attack("negative extent")(lambda _: with_weight(dims=[-(2**63)], raw_data=bytes(8)))


def sparse(dims: Any, count: int = 1) -> bytes:
    def edit(m: Any) -> None:
        for i in range(count):
            message = SparseTensorProto(dims=dims)
            message.values.CopyFrom(helper.make_tensor(f"s{i}", 1, [0], []))
            m.graph.sparse_initializer.append(message)

    return parse(RELU, edit).SerializeToString()


attack("sparse tensor of terabytes")(lambda _: sparse([2**20, 2**20]))
attack("sparse tensor of gigabytes")(lambda _: sparse([2**31]))
attack("sparse tensors of gigabytes together")(lambda _: sparse([2**24], 200))


def bomb(call: str) -> Attack:
    def make(folder: Path) -> bytes:
        (folder / "call").touch()
        text = (
            f"g () => (float[A, B] y) <int64[2] huge = {{1099511627776, 1048576}}, float one = {{1}}> {{ y = {call} }}"
        )
        return parse(text).SerializeToString()

    return make


attack("ConstantOfShape bomb", "OperatorError")(bomb("ConstantOfShape (huge)"))
attack("Expand bomb", "OperatorError")(bomb("Expand (one, huge)"))

# ------------------------------------------------------------------------------------- nesting and recursion


def chain(length: int, twice: bool) -> bytes:
    calls = "t = l.f{0} (a)  r = l.f{0} (t)" if twice else "t = l.f{0} (a)  r = Neg (t)"
    text = CALL.replace("l.f ", f"l.f{length} ") + L + "f0 (a) => (r) { r = Neg (a) }"
    text += "".join(L + f"f{i} (a) => (r) {{ {calls.format(i - 1)} }}" for i in range(1, length + 1))
    return parse(text).SerializeToString()


attack("a billion laughs")(lambda _: chain(60, twice=True))
attack("a chain of a thousand functions")(lambda _: chain(1000, twice=False))
RECURSION = {
    "function that calls itself": L + "f (a) => (r) { r = l.f (a) }",
    "functions in a ring": L + "f (a) => (r) { r = l.g (a) }" + L + "g (a) => (r) { r = l.f (a) }",
    "recursion in a branch": L
    + "f (a) => (r) { k = Constant <value = bool {1}> () r = If (k) <then_branch = p () => (q)"
    " { q = l.f (a) }, else_branch = o () => (n) { n = Neg (a) }> }",
}
for _name, _body in RECURSION.items():
    attack(_name)(lambda _, body=_body: parse(CALL + body).SerializeToString())


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field as protobuf writes it."""
    size, digits = len(content), b""
    while size >= 128:
        digits += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + digits + bytes([size]) + content


def nested(depth: int) -> bytes:
    """If nodes inside one another: graph.node.attribute.g."""
    graph = b""
    for _ in range(depth):
        graph = field(1, field(4, b"If") + field(5, field(1, b"then_branch") + field(6, graph)))
    return b"\x08\x0a" + field(7, graph)


attack("graphs ten thousand deep")(lambda _: nested(10_000))


@attack("types ten thousand deep")
def _(_: Path) -> bytes:
    kind = b""
    for _ in range(10_000):
        kind = field(4, field(1, kind))
    return b"\x08\x0a" + field(7, field(11, field(1, b"x") + field(2, kind)))


# ------------------------------------------------------------------------------------------ names and numbers


def edited(edit: Callable[[Any], Any], text: str = RELU) -> Attack:
    return lambda _: parse(text, edit).SerializeToString()


def link(m: Any, order: Any, closed: bool) -> None:
    """A chain of nodes in the given order, open or closed to a cycle."""
    del m.graph.node[:]
    for i in order:
        first = "last" if closed else "x"
        names = (f"v{i}" if i else first, f"v{i + 1}" if i < MANY - 1 else "last")
        m.graph.node.add(op_type="Neg", input=[names[0]], output=[names[1]])
    m.graph.output[0].name = "last"


attack("ring of many nodes")(edited(lambda m: link(m, range(MANY), True)))
attack("many nodes backwards", "accepted")(edited(lambda m: link(m, reversed(range(MANY)), False)))
attack("node that reads itself")(edited(lambda m: m.graph.node.add(op_type="Neg", input=["z"], output=["z"])))
attack("one name many times")(
    edited(lambda m: m.graph.node.extend(helper.make_node("Neg", ["x"], ["same"]) for _ in range(MANY)))
)
attack("one attribute many times")(
    edited(lambda m: m.graph.node[0].attribute.extend(helper.make_attribute("a", 1) for _ in range(MANY)))
)
attack("one initializer many times")(
    edited(lambda m: m.graph.initializer.extend(TensorProto(name="w", data_type=1, dims=[0]) for _ in range(MANY)))
)
attack("one operator set many times", "accepted")(
    edited(lambda m: m.opset_import.extend(helper.make_opsetid("", 21) for _ in range(MANY)))
)
attack("operands without end")(edited(lambda m: m.graph.node[0].input.extend(["x"] * 1_000_000)))
attack("names of megabytes", "UnsupportedOperatorError")(
    edited(
        lambda m: (
            setattr(m.graph, "name", "n" * 10**7),
            m.graph.node.extend(helper.make_node("No", ["x"], [f"o{i}"], name="m" * 10**4) for i in range(500)),
        )
    )
)
attack("names that are no text")(lambda _: parse(RELU).SerializeToString().replace(b"Relu", b"\xff\xfelu"))
attack("noise")(lambda _: np.random.default_rng(0).bytes(100_000))
attack("half a file")(lambda _: parse(RELU).SerializeToString()[:-7])
attack("versions beyond 64 bits", "UnsupportedError")(edited(lambda m: setattr(m, "ir_version", 2**63 - 1)))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory as Linux does")
def test_attacks_are_cheap_and_confined(tmp_path: Path, subtests: pytest.Subtests) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.attack_child"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, cwd=ROOT) as child:
        assert child.stdin is not None and child.stdout is not None
        for number, (name, (expected, make)) in enumerate(ATTACKS.items()):
            folder = tmp_path / str(number) / "model"
            folder.mkdir(parents=True)
            (folder / "m.onnx").write_bytes(make(folder))
            child.stdin.write(f"{folder}\n")
            child.stdin.flush()
            answer = json.loads(child.stdout.readline())
            with subtests.test(msg=name):
                assert answer.get("convert") == expected, answer
                if expected != "accepted" and not (folder / "call").exists():
                    assert answer["check"] == "refused"
                assert answer["megabytes"] < MEGABYTES, answer
                assert answer["seconds"] < SECONDS, answer
                assert all(Path(p).parent == folder for p in answer["opened"]), answer
        child.stdin.close()
    assert len(ATTACKS) >= 48  # a second one of a name would replace the first

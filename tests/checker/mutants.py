"""Models broken on purpose: each field of a dozen small valid models, changed in each way that its type allows."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from onnx import TensorProto, helper, parser

HEAD = '<ir_version: 10, opset_import: ["" : 21, "l" : 1, "ai.onnx.ml" : 4]> '
TEXTS = {
    "network": """g (float[N, 3, 8, 8] x) => (float[N, 4] y)
        <float[4, 3, 3, 3] w, float[4] b = {1, 2, 3, 4},
         float[N, 4, 6, 6] c, float[N, 4, 6, 6] r, float[N, 4, 1, 1] p> {
        [conv] c = Conv <kernel_shape = [3, 3]> (x, w, b)  [act] r = Relu (c)
        [pool] p = GlobalAveragePool (r)                   [flat] y = Flatten (p) }""",
    "shapes": """g (float[2, 3] x) => (float[3, 2] y, int64[2] s)
        <int64[2] order = {3, 2}, int64[1] zero = {0}, int64[1] three = {3}> {
        s = Shape (x)  one = Constant <value_ints = [1]> ()  a = Slice (x, zero, one)  b = Concat <axis = 0> (a, x)
        c = Slice (b, one, three, zero)  d = Transpose <perm = [1, 0]> (c)  e = Reshape (d, order)
        f = Cast <to = 1> (s)  z = ReduceSum <keepdims = 0> (f)  y = Add (e, z) }""",
    "if": """g (bool c, float[2] x) => (float[2] y) <float[2] w = {1, 2}> {
        y = If (c) <then_branch = t () => (float[2] e) { e = Add (x, w) },
                    else_branch = s () => (float[2] n) <float[2] v = {1, 2}> { n = Mul (x, v) }> }""",
    "loop": """g (int64 m, bool k, float[2] x) => (float[2] y, float[q, 2] rows) {
        y, rows = Loop (m, k, x) <body = b (int64 i, bool go, float[2] s) => (bool more, float[2] t, float[2] row)
        { more = Identity (go)  t = Add (s, s)  row = Identity (t) }> }""",
    "scan": """g (float[2] z, float[5, 2] x) => (float[2] y, float[5, 2] rows) {
        y, rows = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] e) => (float[2] t, float[2] row)
        { t = Add (s, e)  row = Identity (t) }> (z, x) }""",
    "functions": """g (float[2] x) => (float[2] y) { a = l.f <al = 0.5> (x)  y = l.h (a) }
        <domain: "l", opset_import: ["" : 21]> f <al> (v) => (r) { r = Elu <alpha: float = @al> (v) }
        <domain: "l", opset_import: ["" : 21, "l" : 1]> h <be: float = 2.0> (v) => (r)
        { t = l.f <al: float = @be> (v)  r = Neg (t) }""",
    "external": "g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add (x, w) }",
    "sparse": "g (float[3] x) => (float[3] y) { c = Constant <value_float = 1.0> ()  y = Add (x, c) }",
    "quantised": """g (float[2] x) => (float[2] y) <float scale = {0.5}, uint8 zero = {3}> {
        q = QuantizeLinear (x, scale, zero)  y = DequantizeLinear (q, scale, zero) }""",
    "training": """g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul (x, w) }""",
    "sequences": """g (float[2] x, seq(float[2]) s) => (float[2] y, seq(float[2]) t, int64 n) <int64 zero = {0}> {
        t = SequenceInsert (s, x)  y = SequenceAt (t, zero)  n = SequenceLength (t) }""",
    "tables": """g (string[2] x, float[2] f) => (int64[2] y, float[2] b) {
        y = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_int64s = [1, 2], default_int64 = 0> (x)
        b = ai.onnx.ml.Binarizer <threshold = 0.5> (f) }""",
}


def _weights(model: Any) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 3, 3, 3], bytes(4 * 108), raw=True)
    model.graph.initializer.insert(0, weight)


def _external(model: Any) -> None:
    (tensor,) = model.graph.initializer
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", "offset": "0", "length": "8"}.items():
        tensor.external_data.add(key=key, value=value)


def _sparse(model: Any) -> None:
    message = model.graph.sparse_initializer.add(dims=[3])
    message.values.CopyFrom(helper.make_tensor("s", TensorProto.FLOAT, [2], [1.0, 2.0]))
    message.indices.CopyFrom(helper.make_tensor("s_indices", TensorProto.INT64, [2], [0, 2]))


def _annotation(model: Any) -> None:
    annotation = model.graph.quantization_annotation.add(tensor_name="q")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="scale")
    annotation.quant_parameter_tensor_names.add(key="ZERO_POINT_TENSOR", value="zero")


def _training(model: Any) -> None:
    step = "a () => (float[2] n, float[2] f) <float[2] d = {1, 1}> { n = Sub (w, d)  f = Neg (d) }"
    first = "i () => (float[2] v) { v = Constant <value_floats = [1.0, 2.0]> () }"
    info = model.training_info.add()
    info.algorithm.CopyFrom(parser.parse_graph(step))
    info.initialization.CopyFrom(parser.parse_graph(first))
    info.update_binding.add(key="w", value="n")
    info.initialization_binding.add(key="w", value="v")


EDITS: dict[str, Callable[[Any], None]] = {
    "network": _weights,
    "external": _external,
    "sparse": _sparse,
    "quantised": _annotation,
    "training": _training,
}


def models() -> dict[str, onnx.ModelProto]:
    """The valid models; weights of "external" are the file w.bin, of 8 bytes."""
    found = {}
    for name, text in TEXTS.items():
        found[name] = parser.parse_model(HEAD + text)
        if name in EDITS:
            EDITS[name](found[name])
    return found


class Mutant(NamedTuple):
    """A broken model: what was done to it (a message's field, and the change), and the model that it was made from."""

    kind: str
    base: str
    model: onnx.ModelProto


def mutants() -> Iterator[Mutant]:
    """All mutants: of each model each kind, at the first place where it is possible."""
    for base, model in models().items():
        seen = set[str]()
        for number, message in enumerate(_messages(model)):
            for field, _ in message.ListFields():
                for action in _actions(message, field):
                    kind = f"{message.DESCRIPTOR.name}.{field.name} {action}"
                    if kind not in seen:
                        seen.add(kind)
                        copy = onnx.ModelProto.FromString(model.SerializeToString())
                        target = next(m for i, m in enumerate(_messages(copy)) if i == number)
                        _actions(target, field)[action]()
                        yield Mutant(kind, base, copy)


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                yield from _messages(inner)


def _actions(message: Any, field: Any) -> dict[str, Callable[[], Any]]:
    """The changes of a field that is set, by name."""
    value = getattr(message, field.name)
    change = partial(setattr, message, field.name)
    known = None if field.enum_type is None else [v.number for v in field.enum_type.values]
    if field.is_repeated:
        found = {"emptied": partial(message.ClearField, field.name), "first doubled": lambda: value.append(value[0])}
        if len(value) > 1:
            found |= {"first removed": lambda: value.pop(0), "reversed": lambda: _reverse(value)}
        return found | _changes(value[0], partial(value.__setitem__, 0), known, "first ")
    return {"cleared": partial(message.ClearField, field.name)} | _changes(value, change, known)


def _changes(value: Any, change: Callable[[Any], None], known: Any, prefix: str = "") -> dict[str, Callable[[], Any]]:
    match value:
        case str():
            return {f"{prefix}renamed": lambda: change(value + "_")}
        case bytes():
            return {f"{prefix}shortened": lambda: change(value[:-1])}
        case bool() | float():
            return {}
        case int():
            others = {"raised": value + 1} if known is None else {}
            others |= (
                {"negative": -1, "far": 77} if known is None else {"another": next(n for n in known if n != value)}
            )
            return {prefix + name: partial(change, other) for name, other in others.items() if other != value}
    return {}


def _reverse(values: Any) -> None:
    kept = [type(v).FromString(v.SerializeToString()) if hasattr(v, "SerializeToString") else v for v in values]
    del values[:]
    values.extend(kept[::-1])


def verdicts() -> list[str]:
    """For each mutant what the onnx package says: "" if it accepts the model, or the error. Needs w.bin in the folder.

    In a process of its own, because the package may abort it.
    """
    found: list[str] = []
    total = sum(1 for _ in mutants())
    while len(found) < total:
        command = [sys.executable, "-m", __name__, str(len(found))]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        lines = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        ).stdout.splitlines()
        found += map(json.loads, lines)
        if len(found) < total:
            found.append("it aborts the process")
    return found


def _verdict(mutant: Mutant) -> str:
    model: Any = mutant.model
    if mutant.base == "external":  # external data are found beside a file alone
        onnx.save(model, model := "mutant.onnx")
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as e:
        return f"{type(e).__name__}: {e}"[:200]
    return ""


if __name__ == "__main__":
    for broken in itertools.islice(mutants(), int(sys.argv[1]), None):
        print(json.dumps(_verdict(broken)), flush=True)

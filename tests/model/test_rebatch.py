"""Batch sizes in constants of a model: repaired with proof, or refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import optax
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import InputShapeError, OperatorError, RebatchError
from tests.support.models import model, value

RNG = np.random.default_rng(5)


def weight(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / 3).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def made(nodes: list[Any], shape: list[Any], constants: dict[str, np.ndarray], opset: int = 17) -> onnx.ModelProto:
    """x -> y; the outputs' shape is not declared."""
    return model(nodes, [value("x", np.float32, shape)], [value("y", np.float32, None)], constants, opset)


def flattened(shape: Any = (1, 12), first: Any = 1) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Reshape", ["r", "shape"], ["f"], "flat"),
        helper.make_node("MatMul", ["f", "w"], ["y"]),
    ]
    return made(nodes, [first, 3, 2, 2], {"shape": ints(*shape), "w": weight(12, 5)})


def attention(batch: Any = 1) -> onnx.ModelProto:
    """Sequence first, two heads merged with the batch, as PyTorch writes it: [4, b, 6] -> [4, b * 2, 3] and back."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        helper.make_node("Reshape", ["t", "heads"], ["h"], "split"),
        helper.make_node("Transpose", ["h"], ["q"], perm=[1, 0, 2]),
        helper.make_node("Transpose", ["h"], ["k"], perm=[1, 2, 0]),
        helper.make_node("MatMul", ["q", "k"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"]),
        helper.make_node("MatMul", ["p", "q"], ["o"]),
        helper.make_node("Transpose", ["o"], ["b"], perm=[1, 0, 2]),
        helper.make_node("Reshape", ["b", "rows"], ["m"], "merge"),
        helper.make_node("Gemm", ["m", "w"], ["g"]),
        helper.make_node("Reshape", ["g", "back"], ["u"], "unmerge"),
        helper.make_node("Transpose", ["u"], ["y"], perm=[1, 0, 2]),
    ]
    constants = {"heads": ints(4, 2, 3), "rows": ints(4, 6), "back": ints(4, 1, 6), "w": weight(6, 6)}
    return made(nodes, [batch, 4, 6], constants)


def with_token() -> onnx.ModelProto:
    """A learnt token before the sequence, already expanded to a batch of 1, and zeros for the state of an LSTM."""
    nodes = [
        helper.make_node("Concat", ["token", "x"], ["c"], "join", axis=1),
        helper.make_node("Transpose", ["c"], ["t"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["t", "lw", "lr", "", "", "h0", "c0"], ["", "h"], "lstm", hidden_size=2),
        helper.make_node("Squeeze", ["h", "zero"], ["y"]),
    ]
    constants = {"token": weight(1, 1, 3), "lw": weight(1, 8, 3), "lr": weight(1, 8, 2), "zero": ints(0)}
    constants |= {"h0": weight(1, 1, 2), "c0": np.zeros((1, 1, 2), np.float32)}
    return made(nodes, [1, 4, 3], constants)


def sliced(opset: int) -> onnx.ModelProto:
    """The whole batch by its number, in a Slice and an Expand; the shape of a Reshape in an attribute below opset 5."""
    if opset < 5:
        nodes = [
            helper.make_node("Slice", ["x"], ["s"], "all", starts=[0, 1], ends=[1, 3], axes=[0, 1]),
            helper.make_node("Reshape", ["s"], ["y"], "flat", shape=[1, -1]),
        ]
        return made(nodes, [1, 4, 3], {}, opset)
    nodes = [
        helper.make_node("Slice", ["x", "starts", "ends"], ["s"], "all"),
        helper.make_node("Expand", ["s", "shape"], ["y"], "wide"),
    ]
    return made(nodes, [1, 4, 1], {"starts": ints(0, 1), "ends": ints(1, 3), "shape": ints(1, 2, 5)}, opset)


def pairs() -> onnx.ModelProto:
    """A batch of 2 in the constants."""
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"], "flat"),
        helper.make_node("Expand", ["r", "wider"], ["y"], "wide"),
    ]
    return made(nodes, [2, 3, 2], {"shape": ints(2, 6, 1), "wider": ints(2, 6, 4)})


REPAIRED = {
    "flatten": (flattened(), ["flat"]),
    "flatten-open": (flattened((1, -1)), ["flat"]),
    "flatten-declared-free": (flattened((1, 12), "batch"), ["flat"]),
    "attention": (attention(), ["split", "merge", "unmerge"]),
    "token-and-state": (with_token(), ["join", "lstm"]),
    "slice-and-expand": (sliced(13), ["all"]),
    "attributes": (sliced(4), ["all", "flat"]),
    "two": (pairs(), ["flat", "wide"]),
}


@pytest.mark.parametrize(("proto", "changed"), REPAIRED.values(), ids=REPAIRED)
def test_a_repaired_model_gives_for_a_batch_what_the_file_gives_for_its_parts(
    proto: onnx.ModelProto, changed: list[str]
) -> None:
    original, free = onnx2jax.convert(proto), onnx2jax.convert(proto, rebatch=True)
    declared = original.inputs[0].type.shape
    size = declared[0] if isinstance(declared[0], int) else 1
    x = RNG.normal(size=(5 * size, *declared[1:])).astype(np.float32)
    apart = np.concatenate([original(x[i : i + size]) for i in range(0, len(x), size)])
    np.testing.assert_allclose(free(x), apart, rtol=1e-5, atol=1e-6)
    assert isinstance(free.inputs[0].type.shape[0], str)
    assert [next(n for n in changed if f"{n!r}" in text) for text in free.rebatched] == changed
    assert all(text in free.explain() for text in free.rebatched)


def test_what_follows_the_batch_by_itself_stays_as_it_is() -> None:
    assert onnx2jax.convert(flattened((-1, 12)), rebatch=True).rebatched == ()
    assert onnx2jax.convert(flattened((0, -1), "n"), rebatch=True).rebatched == ()
    assert onnx2jax.convert(onnx2jax.demo_model(), rebatch=True).rebatched == ()


def test_a_call_with_another_batch_size_points_to_rebatch() -> None:
    x = np.zeros((3, 3, 2, 2), np.float32)
    with pytest.raises(InputShapeError, match=r"extent 1 on axis 0, but 3 .*convert\(..., rebatch=True\)"):
        onnx2jax.convert(flattened())(x)
    with pytest.raises(OperatorError, match=r"(?s)'flat'.*\(3, 3, 2, 2\).*\(1, 12\).*convert\(..., rebatch=True\)"):
        onnx2jax.convert(flattened(first="n"))(x)


def test_a_repaired_model_is_trained_at_its_new_batch_size_and_saved_as_it_was(tmp_path: Any) -> None:
    model = onnx2jax.convert(flattened(), rebatch=True)
    x, w = RNG.normal(size=(8, 3, 2, 2)).astype(np.float32), model.params["w"]
    tuned = onnx2jax.finetune(model, lambda y, batch: ((y - batch["y"]) ** 2).mean(), optax.sgd(1.0))
    state, _ = tuned.step(tuned.init(), {"x": x, "y": np.ones((8, 5), np.float32)})
    rows = np.maximum(x.reshape(8, 12), 0)
    np.testing.assert_allclose(state.params["w"], w - 2 * rows.T @ (rows @ w - 1) / 40, rtol=1e-4, atol=1e-5)
    again = onnx2jax.convert(onnx2jax.save(model, tmp_path / "tuned.onnx", params=tuned.params(state)))
    assert again.inputs[0].type.shape[0] == 1
    np.testing.assert_allclose(again(x[:1]), tuned.to_model(state)(x)[:1], rtol=1e-5)


def test_vmap_and_jit_take_a_repaired_model() -> None:
    free = onnx2jax.convert(flattened(), rebatch=True)
    x = RNG.normal(size=(4, 2, 3, 2, 2)).astype(np.float32)
    y = jax.vmap(jax.jit(free.apply), (None, 0))(free.params, x)
    np.testing.assert_allclose(y.reshape(8, 5), free(x.reshape(8, 3, 2, 2)), rtol=1e-5)


def stateful() -> onnx.ModelProto:
    """An input and the state of a GRU, whose batch is the second axis; a gain for all samples."""
    nodes = [
        helper.make_node("Mul", ["x", "gain"], ["g"]),
        helper.make_node("Transpose", ["g"], ["t"], perm=[1, 0, 2]),
        helper.make_node("GRU", ["t", "w", "r", "", "", "h"], ["", "y"], "gru", hidden_size=2),
    ]
    inputs = [
        value("x", np.float32, [1, 4, 3]),
        value("h", np.float32, [2, 1, 2]),
        value("gain", np.float32, [3]),
    ]
    nodes[2].attribute.append(helper.make_attribute("direction", "bidirectional"))
    return model(nodes, inputs, [value("y", np.float32, [2, 1, 2])], {"w": weight(2, 6, 3), "r": weight(2, 6, 2)}, 17)


def test_axes_are_asked_for_where_they_differ_and_taken_by_name() -> None:
    with pytest.raises(RebatchError, match=r"first axes of the inputs differ.*rebatch=\{'input name': axis\}"):
        onnx2jax.convert(stateful(), rebatch=True)
    with pytest.raises(RebatchError, match="'h': 3"):
        onnx2jax.convert(stateful(), rebatch={"x": 0, "h": 3})
    proto = stateful()
    free, original = onnx2jax.convert(proto, rebatch={"x": 0, "h": 1}), onnx2jax.convert(proto)
    x, h, gain = (RNG.normal(size=s).astype(np.float32) for s in ((5, 4, 3), (2, 5, 2), (3,)))
    apart = [original(x[i : i + 1], h[:, i : i + 1], gain) for i in range(5)]
    np.testing.assert_allclose(free(x, h, gain), np.concatenate(apart, 1), rtol=1e-5, atol=1e-6)
    assert [v.type.shape for v in (*free.inputs, *free.outputs)] == [
        ("batch", 4, 3),
        (2, "batch", 2),
        (3,),
        (2, "batch", 2),
    ]


def coupled() -> onnx.ModelProto:
    """Each sample minus the mean of the batch: shapes are right at any size, numbers are not."""
    nodes = [
        helper.make_node("ReduceMean", ["x", "zero"], ["m"], "mean", keepdims=1),
        helper.make_node("Expand", ["m", "one"], ["e"]),
        helper.make_node("Sub", ["x", "e"], ["y"]),
    ]
    return made(nodes, [2, 3], {"zero": ints(0), "one": ints(1)}, 18)


def taken_apart() -> onnx.ModelProto:
    """The first sample by its index."""
    return made([helper.make_node("Gather", ["x", "zero"], ["y"], "first")], [1, 3], {"zero": ints(0)[0]})


def mixed() -> onnx.ModelProto:
    """Shapes that follow, numbers that do not: sums along the batch."""
    return made([helper.make_node("CumSum", ["x", "zero"], ["y"], "sums")], [1, 3], {"zero": ints(0)[0]})


def constant() -> onnx.ModelProto:
    return made([helper.make_node("Mul", ["x", "none"], ["y"])], [1, 3], {"none": np.zeros(1, np.float32)})


@pytest.mark.parametrize(
    ("proto", "said"),
    [
        (coupled(), r"node 'mean' .* ties the batch size to 2 .*x \[2, 3\].* at 2 and x \[6, 3\].* at 6"),
        (taken_apart(), "node 'first' .* cannot be repaired with certainty"),
        (mixed(), "no node changed, output 0 of 3 batches at once is not that of each alone"),
        (constant(), "the same for different random inputs"),
        (made([helper.make_node("NonZero", ["x"], ["y"], "find")], [1, 3], {}), "cannot be compiled as one program"),
        (made([helper.make_node("Relu", ["x"], ["y"])], None, {}), "no declared rank"),  # type: ignore[arg-type]
        (flattened((1, 13)), "does not run at batch size 1"),
    ],
    ids=["coupled", "indexed", "mixed", "constant", "staged", "rankless", "broken"],
)
def test_what_cannot_be_shown_to_be_right_is_refused(proto: onnx.ModelProto, said: str) -> None:
    with pytest.raises(RebatchError, match=said):
        onnx2jax.convert(proto, rebatch=True)

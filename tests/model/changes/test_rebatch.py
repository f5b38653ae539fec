"""``convert(rebatch=)``: models of a fixed batch size with larger batches."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import optax
import pytest
from jax import export
from onnx import helper

import onnx2jax
from onnx2jax.errors import (
    InputNameError,
    InputShapeError,
    OperatorError,
    RebatchError,
    TrainingFormError,
    UnsupportedError,
)
from tests.support.models import model, value

RNG = np.random.default_rng(5)


def weight(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / 3).astype(np.float32)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def model_proto(
    nodes: list[Any], shape: list[Any], constants: dict[str, np.ndarray], opset: int = 17
) -> onnx.ModelProto:
    """x -> y; the outputs' shape is not declared."""
    return model(nodes, [value("x", np.float32, shape)], [value("y", np.float32, None)], constants, opset)


def flattened(shape: Any = (1, 12), first: Any = 1) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Reshape", ["r", "shape"], ["f"], "flat"),
        helper.make_node("MatMul", ["f", "w"], ["y"]),
    ]
    return model_proto(nodes, [first, 3, 2, 2], {"shape": ints(*shape), "w": weight(12, 5)})


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
    return model_proto(nodes, [batch, 4, 6], constants)


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
    return model_proto(nodes, [1, 4, 3], constants)


def sliced(opset: int) -> onnx.ModelProto:
    """The batch size as a constant of Slice, Expand, and a Reshape attribute below opset 5."""
    if opset < 5:
        nodes = [
            helper.make_node("Slice", ["x"], ["s"], "all", starts=[0, 1], ends=[1, 3], axes=[0, 1]),
            helper.make_node("Reshape", ["s"], ["y"], "flat", shape=[1, -1]),
        ]
        return model_proto(nodes, [1, 4, 3], {}, opset)
    nodes = [
        helper.make_node("Slice", ["x", "starts", "ends"], ["s"], "all"),
        helper.make_node("Expand", ["s", "shape"], ["y"], "wide"),
    ]
    return model_proto(nodes, [1, 4, 1], {"starts": ints(0, 1), "ends": ints(1, 3), "shape": ints(1, 2, 5)}, opset)


def pairs() -> onnx.ModelProto:
    """A batch of 2 in the constants."""
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"], "flat"),
        helper.make_node("Expand", ["r", "wider"], ["y"], "wide"),
    ]
    return model_proto(nodes, [2, 3, 2], {"shape": ints(2, 6, 1), "wider": ints(2, 6, 4)})


def uniques() -> onnx.ModelProto:
    """A value whose extent is known when it is computed."""
    nodes = [helper.make_node("Unique", ["x"], ["u", "i"]), helper.make_node("Neg", ["i"], ["y"])]
    return model_proto(nodes, [1, 3], {})


def coupled() -> onnx.ModelProto:
    """Each sample minus the mean of the two of its batch."""
    nodes = [
        helper.make_node("ReduceMean", ["x", "zero"], ["m"], "mean", keepdims=1),
        helper.make_node("Expand", ["m", "one"], ["e"]),
        helper.make_node("Sub", ["x", "e"], ["y"]),
    ]
    return model_proto(nodes, [2, 3], {"zero": ints(0), "one": ints(1)}, 18)


def mixed() -> onnx.ModelProto:
    """Sums along the batch: shapes follow another size, numbers do not."""
    return model_proto([helper.make_node("CumSum", ["x", "zero"], ["y"], "sums")], [1, 3], {"zero": ints(0)[0]})


def constant() -> onnx.ModelProto:
    return model_proto([helper.make_node("Mul", ["x", "none"], ["y"])], [1, 3], {"none": np.zeros(1, np.float32)})


def known() -> onnx.ModelProto:
    """The same anchors for every sample, constant at compile time."""
    return model_proto([helper.make_node("Identity", ["anchors"], ["y"])], [1, 3], {"anchors": ints([[1, 2]])})


MODELS = {
    "flatten": flattened(),
    "flatten-open": flattened((1, -1)),
    "flatten-declared-free": flattened((1, 12), "batch"),
    "follows": flattened((-1, 12)),
    "attention": attention(),
    "token-and-state": with_token(),
    "slice-and-expand": sliced(13),
    "attributes": sliced(4),
    "two": pairs(),
    "coupled": coupled(),
    "mixed": mixed(),
    "constant": constant(),
    "known": known(),
}


@pytest.mark.parametrize("proto", MODELS.values(), ids=MODELS)
def test_a_batch_matches_its_groups_run_alone(proto: onnx.ModelProto) -> None:
    original, free = onnx2jax.convert(proto), onnx2jax.convert(proto, rebatch=True)
    declared = original.inputs[0].type.shape
    size = declared[0] if isinstance(declared[0], int) else 1
    x = RNG.normal(size=(5 * size, *declared[1:])).astype(np.float32)
    apart = np.concatenate([original(x[i : i + size]) for i in range(0, len(x), size)])
    np.testing.assert_allclose(free(x), apart, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(free(x[:0]), apart[:0])
    assert isinstance(free.inputs[0].type.shape[0], str)
    assert free.jitted


def test_the_error_for_another_batch_size_suggests_rebatch() -> None:
    x = np.zeros((3, 3, 2, 2), np.float32)
    with pytest.raises(InputShapeError, match=r"extent 1 on axis 0, but 3 .*convert\(..., rebatch=True\)"):
        onnx2jax.convert(flattened())(x)
    with pytest.raises(OperatorError, match=r"(?s)'flat'.*\(3, 3, 2, 2\).*\(1, 12\).*convert\(..., rebatch=True\)"):
        onnx2jax.convert(flattened(first="n"))(x)


def test_a_rebatched_model_can_be_trained_and_saved(tmp_path: Any) -> None:
    model = onnx2jax.convert(flattened(), rebatch=True)
    x, w = RNG.normal(size=(8, 3, 2, 2)).astype(np.float32), model.params["w"]
    tuned = onnx2jax.finetune(model, lambda y, batch: ((y - batch["y"]) ** 2).mean(), optax.sgd(1.0))
    state, _ = tuned.step(tuned.init(), {"x": x, "y": np.ones((8, 5), np.float32)})
    rows = np.maximum(x.reshape(8, 12), 0)
    np.testing.assert_allclose(state.params["w"], w - 2 * rows.T @ (rows @ w - 1) / 40, rtol=1e-4, atol=1e-5)
    again = onnx2jax.convert(onnx2jax.save(model, tmp_path / "tuned.onnx", params=tuned.params(state)))
    assert again.inputs[0].type.shape[0] == 1
    np.testing.assert_allclose(again(x[:1]), tuned.to_model(state)(x)[:1], rtol=1e-5)


def test_vmap_and_jit_of_a_rebatched_model() -> None:
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


def test_ambiguous_batch_axes_raise_and_can_be_named() -> None:
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


def test_the_batch_axis_of_an_output_is_declared_or_named() -> None:
    def outputs(*shape: Any) -> onnx.ModelProto:
        inputs = [value("x", np.float32, [1, 4, 1])]
        swap = helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0, 2])
        return model([swap], inputs, [value("y", np.float32, shape or None)], {}, 17)

    x = RNG.normal(size=(5, 4, 1)).astype(np.float32)
    wanted = x.swapaxes(0, 1)
    for free in (
        onnx2jax.convert(outputs(4, 1, 1), rebatch={"x": 0, "y": 1}),
        onnx2jax.convert(outputs(4, 1, 1), rebatch={"x": 0, "y": -2}),
        onnx2jax.convert(outputs(4, 1, None), rebatch=True),
    ):
        np.testing.assert_array_equal(free(x), wanted)
        assert free.outputs[0].type.shape[:2] == (4, "batch")
    with pytest.raises(
        RebatchError, match=r"which axis of output y: .* is the batch\? .*rebatch=\{'y': axis, \.\.\.\}"
    ):
        onnx2jax.convert(outputs(4, 1, 1), rebatch={"x": 0})
    with pytest.raises(RebatchError, match=r"computed as \[4, 1, 1\]: its axis 0 is not the batch"):
        onnx2jax.convert(outputs(), rebatch=True)(x)
    along = onnx2jax.convert(outputs(4, 1, 1), rebatch={"x": 0, "y": 0})
    np.testing.assert_array_equal(along(x).ravel(), x.ravel())
    assert along.outputs[0].type.shape[0] is None


def test_a_batch_must_be_a_multiple_of_the_group_size() -> None:
    with pytest.raises(InputShapeError, match="a batch of 5 is no multiple of 2"):
        onnx2jax.convert(pairs(), rebatch=True)(np.zeros((5, 3, 2), np.float32))
    add = helper.make_node("Add", ["x", "z"], ["y"])
    two = [value("x", np.float32, ["n", 3]), value("z", np.float32, ["m", 3])]
    free = onnx2jax.convert(model([add], two, [value("y", np.float32, None)], {}, 17), rebatch=True)
    with pytest.raises(InputShapeError, match="'n' is 2 in input 'x' but 3"):
        free(np.zeros((2, 3), np.float32), np.zeros((3, 3), np.float32))


def test_a_scalar_per_sample_becomes_a_vector() -> None:
    total = helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)
    ends = [value("x", np.float32, [1, 3])], [value("y", np.float32, [])]
    x = RNG.normal(size=(4, 3)).astype(np.float32)
    for rebatch in (True, {"x": 0}):
        free = onnx2jax.convert(model([total], *ends, {}, 17), rebatch=rebatch)
        np.testing.assert_allclose(free(x), x.sum(1), rtol=1e-5)
        assert free.outputs[0].type.shape == ("batch",)


def test_each_group_draws_its_own_random_numbers() -> None:
    free = onnx2jax.convert(model_proto([helper.make_node("RandomNormalLike", ["x"], ["y"])], [1, 3], {}), rebatch=True)
    x = np.zeros((4, 3), np.float32)
    drawn = np.asarray(free(x, rng=1))
    assert len(np.unique(drawn)) == drawn.size
    np.testing.assert_array_equal(free(x, rng=1), drawn)


def test_a_shared_input_may_determine_shapes() -> None:
    reshape = helper.make_node("Reshape", ["x", "shape"], ["y"], "reshape")
    inputs = [value("x", np.float32, [1, 4]), value("shape", np.int64, [3])]
    free = onnx2jax.convert(model([reshape], inputs, [value("y", np.float32, [1, None, None])]), rebatch={"x": 0})
    x = RNG.normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_array_equal(free(x, ints(1, 2, 2)), x.reshape(3, 2, 2))


def test_export_with_a_symbolic_batch() -> None:
    for proto, shape in ((flattened(), "b, 3, 2, 2"), (pairs(), "2*b, 3, 2")):
        free = onnx2jax.convert(proto, rebatch=True)
        x = jax.ShapeDtypeStruct(export.symbolic_shape(shape), np.float32)
        exported = export.export(jax.jit(free.apply))(free.params, x)
        value = RNG.normal(size=(6, *free.inputs[0].type.shape[1:])).astype(np.float32)
        np.testing.assert_allclose(exported.call(free.params, value), free(value), rtol=1e-6)


def test_an_exported_program_takes_multiples_of_the_group_size(tmp_path: Any) -> None:
    free = onnx2jax.convert(pairs(), rebatch=True)
    exported = onnx2jax.load_exported(free.export(tmp_path / "out", platforms=["cpu"]))
    x = RNG.normal(size=(6, 3, 2)).astype(np.float32)
    np.testing.assert_array_equal(exported(x), free(x))
    with pytest.raises(InputShapeError, match="takes multiples of 2"):
        exported(x[:3])
    with pytest.raises(UnsupportedError, match="convert without rebatch="):
        free.to_source(tmp_path)


def test_reports_name_nodes_as_the_file_does() -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["n"], "seek"), helper.make_node("Cast", ["n"], ["y"], to=1)]
    free = onnx2jax.convert(model_proto(nodes, [1, 3], {}), rebatch=True)
    for report in (free.summary, free.profile):
        with pytest.raises(RebatchError, match="'seek'"):
            report(np.ones((2, 3), np.float32))


def test_rebatched_training_recomputes_nodes_without_batch_statistics() -> None:
    free = onnx2jax.convert(flattened(), rebatch=True)
    loss = lambda y, _: (y**2).mean()  # noqa: E731
    x = {"x": RNG.normal(size=(8, 3, 2, 2)).astype(np.float32)}
    plain, again = (onnx2jax.finetune(free, loss, optax.sgd(1.0), remat=names) for names in ((), "flat"))
    states = [tuned.step(tuned.init(), x)[0] for tuned in (plain, again)]
    np.testing.assert_allclose(states[0].params["w"], states[1].params["w"], rtol=1e-6)
    with pytest.raises(InputNameError, match=r"'missing', which no node name matches; the first are .*'flat'"):
        onnx2jax.finetune(free, loss, optax.sgd(1.0), remat="missing")
    constants = {n: weight(3) for n in ("scale", "bias", "mean")} | {"var": np.ones(3, np.float32)}
    norm = helper.make_node("BatchNormalization", ["x", *constants], ["y"])
    free = onnx2jax.convert(model_proto([norm], [1, 3, 2, 2], constants), rebatch=True)
    with pytest.raises(TrainingFormError, match=r"each group of samples .* rebatch= .*leave batchnorm='frozen'"):
        onnx2jax.finetune(free, loss, optax.sgd(1.0), batchnorm="train")


def taken_apart() -> onnx.ModelProto:
    """The first sample by its index."""
    return model_proto([helper.make_node("Gather", ["x", "zero"], ["y"], "first")], [1, 3], {"zero": ints(0)[0]})


def listed() -> onnx.ModelProto:
    split = helper.make_node("SplitToSequence", ["x"], ["y"])
    outputs = [helper.make_tensor_sequence_value_info("y", onnx.TensorProto.FLOAT, None)]
    return model([split], [value("x", np.float32, [1, 3])], outputs)


def texts() -> onnx.ModelProto:
    ends = [value(n, np.object_, [1, 3]) for n in "xy"]
    return model([helper.make_node("Identity", ["x"], ["y"])], ends[:1], ends[1:])


@pytest.mark.parametrize(
    ("proto", "said"),
    [
        (taken_apart(), r"output y: .* is computed as \[3\]: its axis 0 is not the batch"),
        (
            model_proto([helper.make_node("NonZero", ["x"], ["y"], "find")], [1, 3], {}),
            "cannot be compiled as one program: node 'find'.* must be known before compiling",
        ),
        (model_proto([helper.make_node("Relu", ["x"], ["y"])], None, {}), "no tensor of numbers with a declared rank"),  # type: ignore[arg-type]
        (flattened((1, 13)), "does not run at batch size 1, which its inputs declare: node 'flat'"),
        (listed(), "output y: .* is no tensor of numbers"),
        (texts(), "x: string.* is no tensor of numbers"),
    ],
    ids=["indexed", "staged", "rankless", "broken", "sequence", "strings"],
)
def test_models_that_cannot_be_rebatched_are_rejected(proto: onnx.ModelProto, said: str) -> None:
    with pytest.raises(RebatchError, match=said):
        onnx2jax.convert(proto, rebatch=True)(np.ones((2, 3, 2, 2) if "flat" in said else (2, 3), np.float32))


@pytest.mark.parametrize(
    ("shape", "target", "x", "said"),
    [
        ([1, "s", 6], (1, 1, 6), (3, 2, 6), "1, which its inputs declare, and s = 2, which they leave free; pass the"),
        ([None, None, 6], (1, 1, 6), (3, 2, 6), "its inputs leave the batch free, and axis 1 of 'x' = 2, which"),
        (["n", 6], (2, 6), (4, 6), "1, because its inputs leave the batch free; .* exported with another, declare it"),
    ],
    ids=["another extent", "both", "the batch"],
)
def test_the_error_names_the_extents_that_inputs_leave_free(shape: Any, target: Any, x: Any, said: str) -> None:
    proto = model_proto([helper.make_node("Reshape", ["x", "shape"], ["y"], "flat")], shape, {"shape": ints(*target)})
    with pytest.raises(RebatchError, match=said) as raised:
        onnx2jax.convert(proto, rebatch=True)(np.ones(x, np.float32))
    assert f"cannot be reshaped to {target}\n" in str(raised.value)  # without the advice to use rebatch=


def test_nodes_of_a_rebatched_model_are_seen_and_cut(tmp_path: Any) -> None:
    proto = attention()
    original, free = onnx2jax.convert(proto), onnx2jax.convert(proto, rebatch=True)
    x = RNG.normal(size=(3, 4, 6)).astype(np.float32)
    alone, values = [original.values(x[i : i + 1]) for i in range(3)], free.values(x)
    for name, found in values.items():  # some begin with the batch, of one, others with positions or heads
        parts = [v[name] for v in alone]
        joined = np.concatenate(parts) if parts[0].shape[0] == 1 else np.stack(parts)
        np.testing.assert_allclose(found, joined, rtol=1e-5, atol=1e-6, err_msg=name)
    rows = {row.name: row for row in free.summary(x).nodes}
    assert [*rows] == [n.name for n in original.graph.nodes]
    assert (
        "12 (Transpose, Reshape, MatMul, Softmax, Gemm)" in free.explain() and "jax.vmap over groups" in free.explain()
    )
    assert rows["split"].outputs == {"h": "float32[3, 4, 2, 3]"} and rows["g"].flops == 3 * 2 * 4 * 6 * 6
    assert "unmerge" in free.draw(tmp_path / "free.html", inputs={"x": x}).read_text()
    part = free.cut(outputs=["o"])
    plain = onnx2jax.convert(part.save(tmp_path / "part.onnx"))
    np.testing.assert_allclose(part(x), values["o"], rtol=1e-5, atol=1e-6)
    for whole in (plain, part.with_options(rebatch=False)):
        assert whole.inputs[0].shape == (1, 4, 6)
        np.testing.assert_allclose(whole(x[:1]), values["o"][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(free.simplified()(x), values["y"], rtol=1e-5, atol=1e-6)


def test_a_rebatched_model_takes_another_number_of_classes(tmp_path: Any) -> None:
    proto = flattened()
    proto.graph.output[0].CopyFrom(value("y", np.float32, [1, 5]))
    new = onnx2jax.convert(proto, rebatch=True).with_params({"w": weight(12, 2)}, new_shapes=True)
    assert new.outputs[0].shape == ("batch", 2) and new(np.zeros((3, 3, 2, 2), np.float32)).shape == (3, 2)
    assert onnx2jax.convert(new.save(tmp_path / "new.onnx")).outputs[0].shape == (1, 2)


def test_the_summary_of_a_rebatched_model_may_need_a_value() -> None:
    reshape = helper.make_node("Reshape", ["x", "shape"], ["y"], "reshape")
    inputs = [value("x", np.float32, [1, 4]), value("shape", np.int64, [3])]
    free = onnx2jax.convert(model([reshape], inputs, [value("y", np.float32, [1, None, None])]), rebatch={"x": 0})
    found = free.summary({"x": (3, 4), "shape": ints(1, 2, 2)})
    assert found.nodes[0].outputs == {"y": "float32[3, 2, 2]"} and found.nodes[0].flops == 0


def test_a_part_of_a_rebatched_model_needs_its_batch_axis() -> None:
    proto = pairs()
    free = onnx2jax.convert(proto, rebatch=True)
    x = RNG.normal(size=(4, 3, 2)).astype(np.float32)
    np.testing.assert_array_equal(free.cut(inputs="r")(free.values(x, names="r")["r"]), free(x))
    with pytest.raises(RebatchError, match=r"batch axis of input i: None is unknown: declare .*infer_shapes"):
        onnx2jax.convert(uniques(), rebatch=True).cut(inputs="i")
    proto.graph.value_info.append(value("r", np.float32, [6, 2]))
    with pytest.raises(RebatchError, match=r"cut the model .* with_options\(rebatch=\{'r': axis\}\)"):
        onnx2jax.convert(proto, rebatch=True).cut(inputs="r")

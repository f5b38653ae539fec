"""Low-rank adapters: results for each kind of weight, frozen weights, files, and errors."""

from __future__ import annotations

import ast
import itertools
import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from jax.sharding import PartitionSpec as P
from onnx import helper

import onnx2jax
from onnx2jax.errors import (
    AdapterWarning,
    CheckpointError,
    InputNameError,
    InputShapeError,
    InputTypeError,
    TrainingFormError,
    UnsupportedError,
)
from tests.conformance.test_devices import annotate
from tests.support import training
from tests.support.helpers import mesh
from tests.support.models import mlp, model, value
from tests.support.tiers import canaries, extended

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax

RNG = np.random.default_rng(0)
K, N, F, H = 32, 8, np.float32, np.float16
W = RNG.normal(size=(K, N)).astype(F)
X = RNG.normal(size=(4, K)).astype(F)
BATCH = {"x": X, "t": RNG.normal(size=(4, N)).astype(F)}
INT4 = RNG.integers(-8, 8, (K, N))
PACKED = RNG.integers(0, 256, (N, 2, 8), np.uint8)
SCALES = (np.abs(RNG.normal(size=(N, 2))) / 8 + 0.05).astype(F)


def node(op: str, inputs: str, output: str = "y", **attributes: Any) -> Any:
    return helper.make_node(op, inputs.split(), [output], name=f"/q_proj/{op}", **attributes)


MS: dict[str, Any] = {"domain": "com.microsoft", "K": K, "N": N}
KINDS: dict[str, tuple[list[Any], dict[str, np.ndarray], str, bool]] = {
    "MatMul": ([node("MatMul", "x w")], {"w": W}, "w", False),
    "Gemm": ([node("Gemm", "x w b", transB=1, alpha=2.0)], {"w": W.T.copy(), "b": W[0]}, "w", False),
    "FusedMatMul": (
        [node("FusedMatMul", "x w", transB=1, alpha=0.5, domain=MS["domain"])],
        {"w": W.T.copy()},
        "w",
        False,
    ),
    "Transpose": ([node("Transpose", "w", "v"), node("MatMul", "x v")], {"w": W.T.copy()}, "w", False),
    "float16 stored": ([node("Cast", "w", "v", to=1), node("MatMul", "x v")], {"w": W.astype(H)}, "w", False),
    "float16": (
        [node("Cast", "x", "h", to=10), node("MatMul", "h w", "m"), helper.make_node("Cast", ["m"], ["y"], to=1)],
        {"w": W.astype(H)},
        "w",
        False,
    ),
    "MatMulNBits 4": (
        [node("MatMulNBits", "x w s", bits=4, block_size=16, accuracy_level=1, **MS)],
        {"w": PACKED, "s": SCALES},
        "w",
        True,
    ),
    "MatMulNBits 8": (
        [node("MatMulNBits", "x w s", bits=8, block_size=16, accuracy_level=1, **MS)],
        {"w": RNG.integers(0, 256, (N, 2, 16), np.uint8), "s": SCALES / 16},
        "w",
        True,
    ),
    "MatMulNBits float16": (
        [
            node("Cast", "x", "h", to=10),
            node("MatMulNBits", "h w s", "m", bits=4, block_size=16, accuracy_level=1, **MS),
            helper.make_node("Cast", ["m"], ["y"], to=1),
        ],
        {"w": PACKED, "s": SCALES.astype(H)},
        "w",
        True,
    ),
    "MatMulBnb4": (
        [node("MatMulBnb4", "x w s", quant_type=1, block_size=16, **MS)],
        {"w": RNG.integers(0, 256, K * N // 2, np.uint8), "s": np.abs(W).reshape(-1)[: K * N // 16] + F(0.1)},
        "w",
        True,
    ),
    "QDQ int4": (
        [node("DequantizeLinear", "w s", "v", axis=0, block_size=16), node("MatMul", "x v")],
        {"w": INT4.astype(ml_dtypes.int4), "s": SCALES.T.copy()},
        "w",
        True,
    ),
    "QDQ int8": (
        [node("DequantizeLinear", "w s z", "v", axis=1), node("MatMul", "x v")],
        {"w": (INT4 * 16).astype(np.int8), "s": SCALES[:, 0] / 16, "z": np.arange(N).astype(np.int8)},
        "w",
        True,
    ),
    "int8 by hand": (
        [node("Cast", "w", "c", to=1), node("Mul", "c s", "v"), node("MatMul", "x v")],
        {"w": (INT4 * 16).astype(np.int8), "s": SCALES[:, 0] / 16},
        "w",
        True,
    ),
    "uint8 by hand": (
        [
            node("Cast", "w", "c", to=1),
            helper.make_node("Cast", ["z"], ["zero"], to=1),
            node("Sub", "c zero", "d"),
            node("Mul", "s d", "m"),
            node("Transpose", "m", "v"),
            node("MatMul", "x v"),
        ],
        {"w": (INT4.T + 8).astype(np.uint8), "s": SCALES[:, :1], "z": np.full((N, 1), 8, np.uint8)},
        "w",
        True,
    ),
}


def file(nodes: list[Any], weights: dict[str, np.ndarray], **options: Any) -> onnx.ModelProto:
    """x [n, 32] -> y [n, 8]."""
    ends = [value("x", F, ["n", K])], [value("y", F, ["n", N])]
    four = {n: v for n, v in weights.items() if v.dtype == ml_dtypes.int4}
    others = {n: v for n, v in weights.items() if n not in four}
    proto = model(nodes, *ends, others, **({"opsets": {"com.microsoft": 1}} | options))
    for name, v in four.items():
        proto.graph.initializer.append(helper.make_tensor(name, 22, v.shape, v.astype(np.int8).ravel()))
    return proto


def squares(y: Any, batch: dict[str, Any]) -> Any:
    return ((y - batch["t"]) ** 2).mean()


def results(*models: onnx2jax.Model) -> list[np.ndarray]:
    """What several models compute of X, by one program."""
    return [np.asarray(y) for y in jax.jit(lambda x: [m(x) for m in models])(X)]


def tuning(proto: onnx.ModelProto, lora: Any = 4, **options: Any) -> onnx2jax.training.FineTuning:
    return onnx2jax.finetune(onnx2jax.convert(proto), squares, optax.adam(0.05), lora=lora, **options)


def after(tuned: onnx2jax.training.FineTuning, steps: int = 5, batch: Any = BATCH) -> tuple[Any, list[float]]:
    return training.trained(tuned, batch, steps, 3)


OTHER_KINDS = {"FusedMatMul", "float16 stored", "MatMulNBits 8", "MatMulBnb4", "QDQ int8", "int8 by hand"}
"""Each beside a kind that takes the same way."""


@pytest.mark.parametrize("kind", canaries(KINDS, KINDS.keys() - OTHER_KINDS))
def test_adapter_of_a_linear_map(kind: str, tmp_path: Path) -> None:
    nodes, weights, name, packed = KINDS[kind]
    proto = file(nodes, weights)
    base = onnx2jax.convert(proto)
    tuned = tuning(proto, lora_alpha=6)
    assert tuned.trainable == (f"{name}.lora_A", f"{name}.lora_B")
    state, losses = after(tuned)
    assert losses[-1] < losses[0]
    a, b = (np.asarray(state.params[f"{name}.lora_{which}"]) for which in "AB")
    assert a.shape == (K, 4) and b.shape == (4, N) and a.dtype == b.dtype == F
    trained = tuned.to_model(state)
    half = "float16" in kind
    tolerance: dict[str, float] = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
    path = onnx2jax.save(trained, tmp_path / "trained.onnx")
    onnx.checker.check_model(path)
    before, after_it, saved = results(base, trained, onnx2jax.convert(path))
    np.testing.assert_allclose(squares(before, BATCH), losses[0], rtol=1e-5)  # B is zero
    np.testing.assert_allclose(after_it, before + X @ a @ b * 6 / 4, **tolerance)
    np.testing.assert_allclose(saved, after_it, rtol=1e-6, atol=1e-6)

    # A packed weight is unchanged, with added nodes; a floating-point one is updated, without.
    stored = base.params | dict(base.graph.initializers)
    now = trained.graph.initializers | dict(trained.params)
    same = {n for n, v in stored.items() if np.array_equal(v, now[n])}
    assert (name in same) == packed and same >= stored.keys() - {name}
    assert len(trained.graph.nodes) - len(base.graph.nodes) == (4 + 2 * half if packed else 0)
    options = onnxruntime.SessionOptions()  # its optimisations round activations of integer products to 8 bits
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (found,) = onnxruntime.InferenceSession(path, options).run(None, {"x": X})
    np.testing.assert_allclose(found, after_it, **tolerance)
    loss = tuned.step(state, BATCH)[1]["loss"]
    np.testing.assert_allclose(squares(after_it, BATCH), loss, rtol=2e-2 if half else 1e-4)


def test_losses_with_packed_weights_match_float32() -> None:
    head = RNG.normal(size=(N, N)).astype(F)
    tail = [helper.make_node("Tanh", ["h"], ["r"]), helper.make_node("MatMul", ["r", "head"], ["y"])]
    packed = [node("MatMulNBits", "x w s", "h", bits=4, block_size=16, **MS)]
    wide = ((np.stack([PACKED & 15, PACKED >> 4], -1).reshape(N, 2, 16) - F(8)) * SCALES[..., None]).reshape(N, K).T
    kinds = (packed, {"w": PACKED, "s": SCALES}), ([node("MatMul", "x w", "h")], {"w": wide})
    losses = [after(tuning(file([*n, *tail], w | {"head": head})), 30)[1] for n, w in kinds]
    assert losses[0][-1] < losses[0][0] / 3
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)


def test_patterns_match_weights_and_nodes_and_the_first_applies() -> None:
    ranks = lambda lora: {a.map.name: a.rank for a in tuning(mlp(), lora)._adapters}  # noqa: E731
    assert ranks(2) == {"w1": 2, "w2": 2}
    assert ranks({"head": 1}) == {"w2": 1}  # the node's name
    assert ranks({"w2": 1, "*": 3}) == {"w1": 3, "w2": 1}


def test_initial_values_of_a_and_b() -> None:
    tuned = tuning(mlp(), 2)
    first, second = tuned.init(0).params, tuned.init(1).params
    assert not np.array_equal(first["w1.lora_A"], second["w1.lora_A"])
    assert 0.3 < np.abs(first["w1.lora_A"]).max() <= 0.5  # uniform within 1 / sqrt(4)
    assert not first["w1.lora_B"].any()


def test_trainable_adds_parameters() -> None:
    tuned = tuning(mlp(), {"head": 2}, trainable=["b*", "w2"])
    assert set(tuned.trainable) == {"w2.lora_A", "w2.lora_B", "b1", "b2", "w2"}
    assert tuned.left_out()["w1"] == "frozen: adapters are trained"
    x = RNG.normal(size=(4, 4)).astype(F)
    state, _ = after(tuned, 3, {"x": x, "t": np.zeros((4, 2), F)})
    trained = tuned.to_model(state)
    values = {n: np.asarray(v) for n, v in state.params.items()}
    expected = values["w2"] + values["w2.lora_A"] @ values["w2.lora_B"]
    np.testing.assert_allclose(trained.params["w2"], expected, rtol=1e-6)


def test_adapter_files(tmp_path: Path) -> None:
    nodes, weights, *_ = KINDS["MatMulNBits 4"]
    proto = file(nodes, weights)
    tuned = tuning(proto, lora_alpha=8)
    state, _ = after(tuned)
    path = tuned.save_adapter(tmp_path / "adapter.safetensors", state)
    assert path.stat().st_size < 4096
    again = tuned.load_adapter(path)
    assert again.step == 0 and np.array_equal(again.params["w.lora_B"], state.params["w.lora_B"])
    found = onnx2jax.training.load_adapter(onnx2jax.convert(proto), path)(X)
    np.testing.assert_array_equal(found, tuned.to_model(state)(X))

    with pytest.raises(CheckpointError, match=r"scales \{'w': 2.0\} by weight, but lora_alpha gives \{'w': 1.0\}"):
        tuning(proto).load_adapter(path)
    with pytest.raises(CheckpointError, match="does not match"):
        tuning(proto, 2, lora_alpha=4).load_adapter(path)
    with pytest.raises(CheckpointError, match="'w', which is not a linear map of the model"):
        onnx2jax.training.load_adapter(onnx2jax.convert(mlp()), path)
    onnx2jax.training.save_checkpoint(path, {"w": W})
    with pytest.raises(CheckpointError, match="not written by save_adapter"):
        onnx2jax.training.load_adapter(onnx2jax.convert(proto), path)


def test_without_safetensors_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    tuned = tuning(mlp(), 2)
    with pytest.raises(ImportError, match=r"needs the extra checkpoint .*pip install"):
        tuned.save_adapter(tmp_path / "a", tuned.init())
    with pytest.raises(ImportError, match=r"needs the extra checkpoint .*pip install"):
        onnx2jax.training.load_adapter(onnx2jax.convert(mlp()), tmp_path / "a")


def test_a_saved_adapter_can_be_trained_further(tmp_path: Path) -> None:
    nodes, weights, *_ = KINDS["QDQ int8"]
    tuned = tuning(file(nodes, weights))
    state, losses = after(tuned)
    path = onnx2jax.save(tuned.to_model(state), tmp_path / "with_adapter.onnx")
    more = onnx2jax.finetune(onnx2jax.convert(path), squares, optax.adam(0.05), trainable="*.lora_[AB]")
    assert set(more.trainable) == set(tuned.trainable)
    assert after(more)[1][-1] < losses[-1]
    with pytest.raises(TrainingFormError, match="already has an adapter in the file; to train that one: trainable="):
        tuning(onnx.load(path), {"/q_proj/MatMul": 2})


def test_models_with_adapter_nodes_are_pickled_and_sharded() -> None:
    nodes, weights, *_ = KINDS["MatMulNBits 4"]
    proto = file(nodes, weights)
    source = onnx2jax.convert(proto, mesh=mesh(data=4), bucket={"n": [8]})
    tuned = onnx2jax.finetune(source, squares, optax.adam(0.05), lora=4)
    state, losses = after(tuned)
    np.testing.assert_allclose(losses, after(tuning(proto))[1], rtol=1e-5)
    trained = tuned.to_model(state)
    assert trained.placement is not None and set(trained.placement.params) == set(trained.params)
    again = pickle.loads(pickle.dumps(trained))
    np.testing.assert_allclose(again(X[:3]), trained(X)[:3], rtol=1e-5)


def test_sharded_adapters() -> None:
    rules = {"*.lora_A": P("model"), "*.lora_B": P(None, "model")}
    tuned = tuning(file(*KINDS["QDQ int4"][:2]), mesh=mesh(data=2, model=4), shardings=rules)
    state, losses = after(tuned)
    assert state.params["w.lora_A"].sharding.spec == state.opt_state[0].mu["w.lora_A"].sharding.spec == P("model")
    np.testing.assert_allclose(losses, after(tuning(file(*KINDS["QDQ int4"][:2])))[1], rtol=1e-4)


def test_rebatched_models() -> None:
    nodes, weights, *_ = KINDS["MatMulNBits 4"]
    proto = model(nodes, [value("x", F, [1, K])], [value("y", F, [1, N])], weights, opsets={"com.microsoft": 1})
    tuned = onnx2jax.finetune(onnx2jax.convert(proto, rebatch=True), squares, optax.adam(0.05), lora=4)
    state, losses = after(tuned)
    np.testing.assert_allclose(losses, after(tuning(file(nodes, weights)))[1], rtol=1e-5)
    np.testing.assert_allclose(
        squares(tuned.to_model(state)(X), BATCH), tuned.evaluate(state, BATCH)["loss"], rtol=1e-5
    )


def test_device_annotations_stay_with_the_product(tmp_path: Path) -> None:
    proto = file(*KINDS["QDQ int8"][:2])
    proto.ir_version = 11
    proto.configuration.add(name="c", num_devices=2)
    annotate(proto.graph.node[1], "y", [(1, 2)])
    tuned = tuning(proto)
    path = onnx2jax.save(tuned.to_model(tuned.init()), tmp_path / "m.onnx")
    assert onnx2jax.check(path).ok
    sharded = onnx2jax.convert(path, device_configuration="c")
    np.testing.assert_allclose(sharded(X), onnx2jax.convert(proto)(X), rtol=1e-5, atol=1e-5)
    source = onnx2jax.convert(proto, device_configuration="c")
    tuned_on_devices = onnx2jax.finetune(source, squares, optax.adam(0.05), lora=4)
    state, losses = after(tuned_on_devices)
    np.testing.assert_allclose(losses, after(tuned)[1], rtol=1e-5)
    trained = tuned_on_devices.to_model(state)
    assert trained.placement is not None
    np.testing.assert_allclose(squares(trained(X), BATCH), tuned_on_devices.evaluate(state, BATCH)["loss"], rtol=1e-5)


def test_a_file_without_the_default_opset_imports_it_for_added_nodes(tmp_path: Path) -> None:
    proto = file(*KINDS["MatMulNBits 4"][:2])
    del proto.opset_import[0]
    tuned = tuning(proto)
    path = onnx2jax.save(tuned.to_model(tuned.init()), tmp_path / "m.onnx")
    assert onnx2jax.check(path).ok and {o.domain for o in onnx.load(path).opset_import} == {"", "com.microsoft"}


def tied() -> onnx.ModelProto:
    """An embedding tied to the output projection."""
    weights = {"table": RNG.normal(size=(16, 8)).astype(F), "inner": RNG.normal(size=(8, 8)).astype(F)}
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"], name="embed"),
        helper.make_node("MatMul", ["e", "inner"], ["h"], name="inner"),
        helper.make_node("Transpose", ["table"], ["turned"], name="turn"),
        helper.make_node("MatMul", ["h", "turned"], ["y"], name="head"),
    ]
    return model(nodes, [value("ids", np.int64, ["n"])], [value("y", F, ["n", 16])], weights)


def test_a_tied_head_gets_no_adapter() -> None:
    assert tuning(tied(), 4).trainable == ("inner.lora_A", "inner.lora_B")
    with pytest.raises(TrainingFormError, match=r"'head'.* is read by node 'embed' .* too, which would change as well"):
        tuning(tied(), {"head": 4})


def test_a_weight_read_by_an_omitted_output_counts_as_shared() -> None:
    proto = mlp()
    proto.graph.node.append(helper.make_node("ReduceSum", ["w2"], ["size"], name="size"))
    proto.graph.output.append(value("size", F, None))
    with pytest.raises(TrainingFormError, match="is read by node 'size'"):
        tuning(proto, {"w2": 2}, outputs=["y"])


def test_opset_6_raises() -> None:
    proto = model([node("MatMul", "x w")], [value("x", F, ["n", K])], [value("y", F, ["n", N])], {"w": W}, opset=6)
    with pytest.raises(UnsupportedError, match="nodes can be added from opset 7 on, and the model has opset 6"):
        tuning(proto)


def test_a_model_without_linear_maps_raises() -> None:
    proto = model([node("Add", "x w")], [value("x", F, ["n", K])], [value("y", F, ["n", K])], {"w": W[0, :1]})
    with pytest.raises(InputTypeError, match=r"no linear map with a stored matrix .* trainable="):
        tuning(proto)


def test_a_product_in_a_branch_raises() -> None:
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["z"], name="deep")], "b", [], [value("z", F, None)]
    )
    proto = model(
        [helper.make_node("If", ["p"], ["y"], name="either", then_branch=branch, else_branch=branch)],
        [value("x", F, ["n", K]), value("p", np.bool_, [])],
        [value("y", F, ["n", N])],
        {"w": W},
    )
    with pytest.raises(InputTypeError, match="'deep', which is not a linear map of the main graph: node 'deep'"):
        tuning(proto, {"deep": 2})


def chain(*extents: int) -> onnx.ModelProto:
    """Products, whose weights have these extents in turn."""
    weights = {f"w{i}": np.ones(shape, F) for i, shape in enumerate(itertools.pairwise(extents))}
    nodes = [node("MatMul", f"h{i} w{i}", f"h{i + 1}") for i in range(len(weights))]
    ends = [value("h0", F, ["n", extents[0]])], [value(f"h{len(weights)}", F, ["n", extents[-1]])]
    return model(nodes, *ends, weights)


@pytest.mark.parametrize(
    ("extents", "lora", "fix"),
    [
        ((9, 5, 4, 9), 7, {"w0": 5, "w1": 4, "w2": 4, "*": 7}),
        ((9, 5, 4, 9), {"w0": 6, "w*": 3}, {"w0": 5, "w*": 3}),
        ((4,) * 12, {"*": 7}, {"*": 4}),
    ],
)
def test_the_fix_of_a_rank_works(extents: tuple[int, ...], lora: Any, fix: dict[str, int]) -> None:
    with pytest.raises(InputShapeError, match="above the extents") as raised:
        tuning(chain(*extents), lora)
    advised = ast.literal_eval(str(raised.value).partition("lora=")[2])
    assert advised == fix
    assert len(tuning(chain(*extents), advised).trainable) == 2 * (len(extents) - 1)


def convolutional(channels: int) -> onnx.ModelProto:
    """A convolution, and a product with a weight of 4 numbers a channel."""
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["y"]),
    ]
    weights = {"kernel": np.ones((channels, 1, 3, 3), F), "w": np.ones((channels, 4), F)}
    return model(nodes, [value("x", F, ["n", 1, 8, 8])], [value("y", F, ["n", 4])], weights)


def test_a_rank_that_leaves_out_convolutions_warns() -> None:
    with pytest.warns(
        AdapterWarning, match="beside 1 of 2 weights of layers. The others, of 1 Conv, .* 69% of"
    ) as found:
        tuned = tuning(convolutional(4), 2)
    assert tuned.trainable == ("w.lora_A", "w.lora_B")
    advice = str(found[0].message).partition("trainable=")[2].removesuffix(")")
    trainable = eval(advice)
    with pytest.warns(AdapterWarning):
        tuned = onnx2jax.finetune(
            onnx2jax.convert(convolutional(4)), squares, optax.sgd(0.1), lora=2, trainable=trainable
        )
    assert set(tuned.trainable) == {"kernel", "w.lora_A", "w.lora_B"}
    assert tuning(convolutional(4), {"w": 2}).trainable == ("w.lora_A", "w.lora_B")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lora": {"v_proj": 8}}, InputNameError, "which matches no weight or node; similar names:"),
        ({"lora": {"act": 2}}, InputTypeError, "'act', which is not a linear map of the main graph: node 'act' (Relu"),
        ({"lora": {"b1": 2}}, InputTypeError, "'b1' float32[8]"),
        ({"lora": 0}, InputShapeError, "rank 0 for '*'; a rank is 1 or more"),
        (
            {"lora": 3},
            InputShapeError,
            "rank 3 for 'w2' [8, 2] of node 'head' (MatMul, opset 21) above the extents",
        ),
        ({"lora": {}}, InputTypeError, "lora is {}"),
        ({"lora": True}, InputTypeError, "lora is True; it must be a rank"),
        ({"lora": {"w1": 2.5}}, InputTypeError, "it must be a rank, or ranks by name pattern"),
        ({"lora": 2, "lora_alpha": 0}, InputTypeError, "lora_alpha is 0"),
        ({"lora": None, "lora_alpha": 2}, InputTypeError, "without adapters to scale"),
    ],
)
def test_invalid_arguments_raise(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error) as raised:
        tuning(mlp(), **options)
    assert message in str(raised.value)


def test_the_state_has_no_frozen_weights() -> None:
    tuned = tuning(file(*KINDS["QDQ int4"][:2]))
    state = tuned.init()
    assert set(state.params) == {"w.lora_A", "w.lora_B"}
    assert {jax.numpy.shape(v) for v in jax.tree.leaves(state.opt_state)} == {(), (K, 4), (4, N)}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("Fp4", F),
        ("Fp8", H),
        extended("Fp4", H),
        extended("Fp8", F),
    ],
)
def test_adapter_of_fp4_and_fp8_weights(kind: str, dtype: Any, tmp_path: Path) -> None:
    """Their bytes are unchanged, and no constant determines the dtype of x."""
    x, y = ("x", "y") if dtype == F else ("h", "m")
    fp4 = {"w": RNG.integers(0, 256, (N, K // 2), np.uint8), "s": np.full((N, 2), 0x30, np.uint8), "g": F([0.2])}
    fp8 = {"w": W.T.astype(ml_dtypes.float8_e4m3fn), "s": SCALES}
    weights = fp4 if kind == "Fp4" else fp8
    op = f"MatMulBlockQuantized{kind}Weight"
    nodes = [node(op, " ".join([x, *weights]), y, domain=MS["domain"], block_size=16)]
    if dtype == H:
        nodes = [node("Cast", "x", "h", to=10), *nodes, helper.make_node("Cast", ["m"], ["y"], to=1)]
    proto = file(nodes, weights)
    base, tuned = onnx2jax.convert(proto), tuning(proto)
    state, losses = after(tuned)
    assert losses[-1] < losses[0]
    trained = tuned.to_model(state)
    a, b = (np.asarray(state.params[f"w.lora_{which}"]) for which in "AB")
    tolerance = 1e-5 if dtype == F else 2e-2
    path = onnx2jax.save(trained, tmp_path / "trained.onnx")
    before, after_it, saved = results(base, trained, onnx2jax.convert(path))
    want = before + X @ a @ b
    np.testing.assert_allclose(after_it, want, rtol=0, atol=tolerance * np.abs(want).max())
    np.testing.assert_array_equal(saved, after_it)
    assert {n: trained.params[n].tobytes() for n in base.params} == {n: v.tobytes() for n, v in base.params.items()}
    unpacked = onnx2jax.finetune(onnx2jax.convert(proto, weights="float32"), squares, optax.adam(0.05), lora=4)
    np.testing.assert_allclose(after(unpacked)[1], losses, rtol=1e-3 if dtype == F else 5e-2)

"""com.microsoft: GreedySearch, BeamSearch and Sampling against onnxruntime, with decoders of one layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx2jax
from tests.ops.test_microsoft import F32, MICROSOFT
from tests.support.helpers import run_op

VOCAB, WIDTH, HEADS, SIZE = 11, 8, 2, 4
INT, FLOAT = TensorProto.INT32, TensorProto.FLOAT


def weights(seed: int, **shapes: tuple[int, ...]) -> list[onnx.TensorProto]:
    rng = np.random.default_rng(seed)
    return [numpy_helper.from_array(rng.normal(size=s).astype(F32), name) for name, s in shapes.items()]


def value(name: str, kind: int, *shape: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def gpt(seed: int = 0) -> onnx.GraphProto:
    """Embeddings of tokens and positions, causal attention, logits."""
    node = helper.make_node
    nodes = [
        node("Gather", ["words", "input_ids"], ["w"]),
        node("Gather", ["places", "position_ids"], ["p"]),
        node("Add", ["w", "p"], ["x"]),
        node(
            "Attention",
            ["x", "qkv", "bias", "attention_mask", "past_0"],
            ["y", "present_0"],
            domain=MICROSOFT,
            num_heads=HEADS,
            unidirectional=1,
        ),
        node("Add", ["x", "y"], ["z"]),
        node("MatMul", ["z", "out"], ["logits"]),
    ]
    inputs = [value(n, INT, "B", "S") for n in ("input_ids", "position_ids")]
    inputs += [value("attention_mask", INT, "B", "T"), value("past_0", FLOAT, 2, "B", HEADS, "P", SIZE)]
    outputs = [value("logits", FLOAT, "B", "S", VOCAB), value("present_0", FLOAT, 2, "B", HEADS, "T", SIZE)]
    stored = weights(
        seed,
        words=(VOCAB, WIDTH),
        places=(32, WIDTH),
        qkv=(WIDTH, 3 * WIDTH),
        bias=(3 * WIDTH,),
        out=(WIDTH, VOCAB),
    )
    return helper.make_graph(nodes, "gpt", inputs, outputs, stored)


HEADED = numpy_helper.from_array(np.array([0, 0, HEADS, SIZE]), "headed")
JOINED = numpy_helper.from_array(np.array([0, 0, WIDTH]), "joined")
BLIND = numpy_helper.from_array(F32([-1e4, 1.0]), "blind")


def heads(x: str, weight: str, to: str) -> list[onnx.NodeProto]:
    node = helper.make_node
    return [
        node("MatMul", [x, weight], [f"{to}_m"]),
        node("Reshape", [f"{to}_m", "headed"], [f"{to}_r"]),
        node("Transpose", [f"{to}_r"], [to], perm=[0, 2, 1, 3]),
    ]


def attended(q: str, k: str, v: str, to: str, bias: str | None = None) -> list[onnx.NodeProto]:
    node = helper.make_node
    nodes = [node("Transpose", [k], [f"{to}_k"], perm=[0, 1, 3, 2]), node("MatMul", [q, f"{to}_k"], [f"{to}_s"])]
    if bias:
        nodes.append(node("Add", [f"{to}_s", bias], [f"{to}_b"]))
    return [
        *nodes,
        node("Softmax", [f"{to}_b" if bias else f"{to}_s"], [f"{to}_p"], axis=-1),
        node("MatMul", [f"{to}_p", v], [f"{to}_o"]),
        node("Transpose", [f"{to}_o"], [f"{to}_t"], perm=[0, 2, 1, 3]),
        node("Reshape", [f"{to}_t", "joined"], [to]),
    ]


def masked() -> list[onnx.NodeProto]:
    """(mask - 1) * 1e4, as a bias [B, 1, 1, length]."""
    node = helper.make_node
    return [
        node("Cast", ["encoder_attention_mask"], ["m"], to=FLOAT),
        node("Sub", ["m", "one"], ["m1"]),
        node("Mul", ["m1", "large"], ["m2"]),
        node("Unsqueeze", ["m2", "axes"], ["seen"]),
    ]


CONSTANTS = [
    HEADED,
    JOINED,
    numpy_helper.from_array(F32(1.0), "one"),
    numpy_helper.from_array(F32(1e4), "large"),
    numpy_helper.from_array(np.array([1, 2]), "axes"),
]


def step(ids: str, past: bool) -> list[onnx.NodeProto]:
    """One step of the decoder: attention to itself, to the encoder, logits."""
    node = helper.make_node
    nodes = [node("Gather", ["words", ids], ["x"]), *heads("x", "wq", "q")]
    nodes += heads("x", "wk", "new_k" if past else "present_key_self_0")
    nodes += heads("x", "wv", "new_v" if past else "present_value_self_0")
    if past:
        nodes.append(node("Concat", ["past_key_self_0", "new_k"], ["present_key_self_0"], axis=2))
        nodes.append(node("Concat", ["past_value_self_0", "new_v"], ["present_value_self_0"], axis=2))
    cross = "past_{}_cross_0" if past else "present_{}_cross_0"
    nodes += [*attended("q", "present_key_self_0", "present_value_self_0", "own"), *masked()]
    nodes += attended("q", cross.format("key"), cross.format("value"), "read", "seen")
    return [
        *nodes,
        node("Add", ["x", "own"], ["x1"]),
        node("Add", ["x1", "read"], ["x2"]),
        node("MatMul", ["x2", "out"], ["logits"]),
    ]


def cache(prefix: str, kind: str) -> list[onnx.ValueInfoProto]:
    return [value(f"{prefix}_{n}_{kind}_0", FLOAT, "B", HEADS, kind[0] + prefix, SIZE) for n in ("key", "value")]


def t5(old: bool) -> tuple[onnx.GraphProto, onnx.GraphProto]:
    """Encoder and decoder; the old encoder makes the decoder's first step."""
    square = (WIDTH, WIDTH)
    shapes = {"words": (VOCAB, WIDTH), "wq": square, "wk": square, "wv": square, "out": (WIDTH, VOCAB)}
    shared = [*weights(1, **shapes), *CONSTANTS]
    nodes = [helper.make_node("Gather", ["letters", "encoder_input_ids"], ["encoder_hidden_states"])]
    nodes += heads("encoder_hidden_states", "ck", "present_key_cross_0")
    nodes += heads("encoder_hidden_states", "cv", "present_value_cross_0")
    inputs = [value(n, INT, "B", "E") for n in ("encoder_input_ids", "encoder_attention_mask")]
    outputs, stored = cache("present", "cross"), weights(2, letters=(VOCAB, WIDTH), ck=square, cv=square)
    if old:
        nodes += step("decoder_input_ids", past=False)
        inputs.append(value("decoder_input_ids", INT, "B", 1))
        hidden = value("encoder_hidden_states", FLOAT, "B", "E", WIDTH)
        outputs = [value("logits", FLOAT, "B", 1, VOCAB), hidden, *cache("present", "self"), *outputs]
    encoder = helper.make_graph(nodes, "encoder", inputs, outputs, stored + (shared if old else CONSTANTS[:1]))
    inputs = [value("input_ids", INT, "B", 1), value("encoder_attention_mask", INT, "B", "E")]
    inputs += [*cache("past", "self"), *cache("past", "cross")]
    outputs = [value("logits", FLOAT, "B", 1, VOCAB), *cache("present", "self")]
    return encoder, helper.make_graph(step("input_ids", past=True), "decoder", inputs, outputs, shared)


NAMES = {
    "GreedySearch": "input_ids max_length min_length repetition_penalty vocab_mask prefix_vocab_mask attention_mask",
    "BeamSearch": "input_ids max_length min_length num_beams num_return_sequences length_penalty repetition_penalty "
    "vocab_mask prefix_vocab_mask attention_mask decoder_input_ids logits_processor",
    "Sampling": "input_ids max_length min_length repetition_penalty vocab_mask prefix_vocab_mask attention_mask "
    "presence_mask seed",
}
OUTPUTS = {
    "GreedySearch": [("sequences", INT)],
    "BeamSearch": [("sequences", INT), ("sequences_scores", FLOAT), ("scores", FLOAT)],
    "Sampling": [("sequences", INT), ("filtered_logits", FLOAT)],
}
FLOATS = {"repetition_penalty", "length_penalty"}


def model(operator: str, outputs: int, operands: dict[str, Any], **attributes: Any) -> tuple[bytes, dict[str, Any]]:
    """A file of one node, and its inputs as arrays."""
    arrays = {n: np.array(v, F32 if n in FLOATS else np.int32) for n, v in operands.items()}
    arrays = {n: v if v.ndim else v[None] for n, v in arrays.items()}
    made = OUTPUTS[operator][:outputs]
    names = [n if n in arrays else "" for n in NAMES[operator].split()]
    node = helper.make_node(operator, names, [n for n, _ in made], domain=MICROSOFT, **attributes)
    inputs = [value(n, FLOAT if v.dtype == F32 else INT, *v.shape) for n, v in arrays.items()]
    graph = helper.make_graph([node], "g", inputs, [value(n, kind) for n, kind in made])
    for output in graph.output:
        output.type.tensor_type.ClearField("shape")
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString(), arrays


def both(operator: str, outputs: int, operands: dict[str, Any], **attributes: Any) -> tuple[list[Any], list[Any]]:
    """What onnx2jax and onnxruntime make of it."""
    file, arrays = model(operator, outputs, operands, **attributes)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    expected = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"]).run(None, arrays)
    results = onnx2jax.convert(file)(**arrays)
    return [np.asarray(v) for v in (results if outputs > 1 else [results])], expected


class Session:
    """A graph attribute whose steps onnxruntime takes: nothing is compiled."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        imports = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
        file = helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()
        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        self.inputs, self.outputs = (
            [SimpleNamespace(name=v.name, type=SimpleNamespace(dtype=F32, shape=shape(v))) for v in values]
            for values in (graph.input, graph.output)
        )

    def __call__(self, *arrays: Any) -> Any:
        return self.session.run(None, {v.name: np.asarray(x) for v, x in zip(self.inputs, arrays, strict=True)})


def shape(v: onnx.ValueInfoProto) -> tuple[Any, ...]:
    return tuple(d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim)


def compared(operator: str, outputs: int, operands: dict[str, Any], **attributes: Any) -> tuple[list[Any], list[Any]]:
    """What the loop around onnxruntime's steps and what onnxruntime's own loop come to."""
    file, arrays = model(operator, outputs, operands, **attributes)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    expected = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"]).run(None, arrays)
    attributes = {n: Session(v) if isinstance(v, onnx.GraphProto) else v for n, v in attributes.items()}
    inputs = [arrays.get(n) for n in NAMES[operator].split()]
    results = run_op(operator, *inputs, domain=MICROSOFT, eager=True, n_outputs=outputs, **attributes)
    return [np.asarray(v) for v in (results if outputs > 1 else [results])], expected


PROMPTS = [[3, 5, 2], [10, 4, 7], [10, 10, 6]]
TOKENS = {"eos_token_id": 8, "pad_token_id": 10}
FEW = [0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1]
RULES: list[dict[str, Any]] = [
    {},
    {"min_length": 6},
    {"repetition_penalty": 2.0},
    {"repetition_penalty": 0.4, "no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 1, "min_length": 9},
    {"vocab_mask": FEW, "prefix_vocab_mask": [FEW[::-1], FEW, FEW[::-1]]},
    {"attention_mask": [[0, 1, 1], [1, 1, 1], [0, 0, 1]]},
]


def split(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and attributes."""
    inputs = {n: v for n, v in given.items() if n in NAMES["BeamSearch"]}
    return inputs, {n: v for n, v in given.items() if n not in inputs}


def same_until_all_end(ours: Any, theirs: Any) -> None:
    """onnxruntime writes nothing behind the step in which the last sequence ends; here it is padding."""
    ends = np.flatnonzero((ours != 10).any(0)).max() + 1
    np.testing.assert_array_equal(ours[:, :ends], theirs[:, :ends])
    assert ours.shape == theirs.shape


@pytest.mark.parametrize("given", RULES)
def test_greedy_search(given: dict[str, Any]) -> None:
    operands, attributes = split(given)
    operands = {"input_ids": PROMPTS, "max_length": 9, **operands}
    for seed in range(3):
        (ours,), (theirs,) = compared("GreedySearch", 1, operands, decoder=gpt(seed), **TOKENS, **attributes)
        same_until_all_end(ours, theirs)


BEAMS: list[dict[str, Any]] = [
    {"num_beams": 1},
    {"num_return_sequences": 2, "length_penalty": 0.0},
    {"num_return_sequences": 3, "length_penalty": 2.0},
    {"early_stopping": 1},
    {"num_beams": 4, "length_penalty": -1.0, "early_stopping": 1},
]


@pytest.mark.parametrize("kind", ["gpt", pytest.param("t5 of 2 inputs", marks=pytest.mark.extended), "t5 of 3 inputs"])
@pytest.mark.parametrize("given", [*RULES, *BEAMS])
def test_beam_search(given: dict[str, Any], kind: str) -> None:
    """Sequences, their scores, those of every token in each step. One sequence at a time: see the limits."""
    operands, attributes = split(given)
    operands = {"max_length": 7, "min_length": 1, "num_beams": 3, "num_return_sequences": 1} | operands
    operands = {"length_penalty": 1.0} | operands
    if kind == "gpt":
        attributes["decoder"] = gpt()
    else:
        encoder, decoder = t5("3" in kind)
        attributes |= {"encoder": encoder, "decoder": decoder, "model_type": 1, "decoder_start_token_id": 0}
    for i in range(3):
        one = {n: operands[n][i : i + 1] for n in ("attention_mask", "prefix_vocab_mask") if n in operands}
        ours, theirs = compared("BeamSearch", 3, operands | one | {"input_ids": [PROMPTS[i]]}, **TOKENS, **attributes)
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4, atol=1e-4)
        assert ours[2].shape == theirs[2].shape
        steps = ours[2].any((1, 2, 3))  # all of them, unless it ended before
        np.testing.assert_allclose(ours[2][steps], theirs[2][steps], rtol=1e-4, atol=1e-4)


def test_batched_search_matches_single_sequences() -> None:
    operands = {"max_length": 8, "min_length": 1, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}
    whole, _ = compared("BeamSearch", 3, operands | {"input_ids": PROMPTS}, decoder=gpt(1), **TOKENS)
    for i, prompt in enumerate(PROMPTS):
        alone, theirs = compared("BeamSearch", 3, operands | {"input_ids": [prompt]}, decoder=gpt(1), **TOKENS)
        for ours, one in zip(whole[:2], alone, strict=False):
            np.testing.assert_allclose(ours[i : i + 1], one, rtol=1e-5)
        np.testing.assert_array_equal(alone[0], theirs[0])
        np.testing.assert_allclose(whole[2][:, i : i + 1], alone[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operator", ["GreedySearch", "BeamSearch"])
def test_a_converted_file(operator: str) -> None:
    """The graphs inside run on the host as those of other nodes do."""
    operands = {"input_ids": PROMPTS[:2], "max_length": 6, "min_length": 1, "repetition_penalty": 1.5}
    attributes: dict[str, Any] = {"decoder": gpt()}
    if operator == "BeamSearch":
        encoder, decoder = t5(False)
        operands |= {"max_length": 4, "num_beams": 2, "num_return_sequences": 2, "length_penalty": 1.0}
        attributes = {"encoder": encoder, "decoder": decoder, "model_type": 1, "decoder_start_token_id": 0}
        attributes["early_stopping"] = 1
    ours, theirs = both(operator, 1, operands, **TOKENS, **attributes)
    if operator == "GreedySearch":
        same_until_all_end(ours[0], theirs[0])
    else:
        np.testing.assert_array_equal(ours[0], theirs[0])


def test_separate_graph_for_the_first_step() -> None:
    operands = {"input_ids": PROMPTS, "max_length": 7, "min_length": 1, "num_beams": 2, "num_return_sequences": 1}
    operands["length_penalty"] = 1.0
    graphs = {"init_decoder": gpt(3), "decoder": gpt(0)}
    ours, theirs = compared("BeamSearch", 1, operands, **TOKENS, **graphs)
    np.testing.assert_array_equal(ours[0], theirs[0])
    without, _ = compared("BeamSearch", 1, operands, **TOKENS, decoder=gpt(0))
    assert (ours[0] != without[0]).any()


@pytest.mark.parametrize("old", [False, True])
def test_greedy_search_of_an_encoder_and_a_decoder(old: bool) -> None:
    """onnxruntime has no such kernel: step by step."""
    encoder, decoder = map(Session, t5(old))
    ids, mask = np.array(PROMPTS, np.int32), np.array([[1, 1, 1], [0, 1, 1], [0, 0, 1]], np.int32)
    attributes = {"encoder": encoder, "decoder": decoder, "model_type": 1, "decoder_start_token_id": 2, **TOKENS}
    result = run_op("GreedySearch", ids, np.array([6]), domain=MICROSOFT, **attributes)
    start = np.full((3, 1), 2, np.int32)
    if old:
        logits, _, *caches = encoder(ids, mask, start)
    else:
        cross = encoder(ids, mask)
        empty = [np.zeros((3, HEADS, 0, SIZE), F32)] * 2
        logits, *own = decoder(start, mask, *empty, *cross)
        caches = [*own, *cross]
    want, done = [start[:, 0]], np.zeros(3, bool)
    while len(want) < 6:
        token = logits[:, -1].argmax(1).astype(np.int32)
        done |= token == TOKENS["eos_token_id"]
        want.append(np.where(done, TOKENS["pad_token_id"], token).astype(np.int32))
        logits, *own = decoder(want[-1][:, None], mask, *caches)
        caches[:2] = own
    np.testing.assert_array_equal(result, np.stack(want, 1))


COLD: list[dict[str, Any]] = [
    {"temperature": 0.01, "top_p": 0.3},
    {"temperature": 0.01, "top_p": 0.9, "min_tokens_to_keep": 1},
    {"top_p": 1e-3},
    {"top_p": 0.0, "min_tokens_to_keep": 1},
]


@pytest.mark.parametrize("attributes", COLD)
def test_sampling_with_one_candidate(attributes: dict[str, Any]) -> None:
    operands = {"input_ids": PROMPTS, "max_length": 8, "min_length": 5, "repetition_penalty": 1.5, "seed": 3}
    (ours,), (theirs,) = compared("Sampling", 1, operands, decoder=gpt(3), **TOKENS, **attributes)
    same_until_all_end(ours, theirs)


def test_sampling_draws_from_the_smallest_set_as_probable_as_top_p() -> None:
    decoder, ids = Session(gpt(3)), np.array([[3, 5, 2]], np.int32)
    operands = [np.repeat(ids, 2000, 0), np.array([4]), *[None] * 6, np.array([7])]
    options = {"decoder": decoder, "temperature": 2.0, "top_p": 0.8, "domain": MICROSOFT, "eager": True, **TOKENS}
    drawn = np.asarray(run_op("Sampling", *operands, **options))[:, 3]
    positions = np.arange(3, dtype=np.int32)[None]
    logits, _ = decoder(ids, positions, np.ones_like(ids), np.zeros((2, 1, HEADS, 0, SIZE), F32))
    p = np.exp(logits[0, -1] / 2) / np.exp(logits[0, -1] / 2).sum()
    order = np.argsort(-p)
    kept = order[: np.searchsorted(np.cumsum(p[order]), 0.8) + 1]
    want = np.zeros(VOCAB)
    want[kept] = p[kept] / p[kept].sum()
    want[10] += want[8]  # the end, for which padding stands
    want[8] = 0
    assert 1 < len(kept) < VOCAB
    np.testing.assert_allclose(np.bincount(drawn, minlength=VOCAB) / 2000, want, atol=0.04)
    again = run_op("Sampling", *operands, **options)
    np.testing.assert_array_equal(again[:, 3], drawn)


WHOLE = {"input_ids": [[3, 5]], "max_length": [4], "min_length": [1], "num_beams": [2], "num_return_sequences": [1]}


@pytest.mark.parametrize(
    ("operator", "changes", "attributes", "said"),
    [
        ("GreedySearch", {"max_length": [2]}, {}, "exceed the prompt's 2 tokens"),
        ("GreedySearch", {"input_ids": [3, 5]}, {}, "input_ids .*batch, length"),
        ("GreedySearch", {"repetition_penalty": [0.0]}, {}, "repetition_penalty"),
        ("GreedySearch", {"vocab_mask": [1, 1]}, {}, "vocab=11"),
        ("GreedySearch", {"prefix_vocab_mask": [[1, 1]]}, {}, "vocab=11"),
        ("GreedySearch", {"prefix_vocab_mask": [[1] * 11] * 2}, {}, "batch=1"),
        ("GreedySearch", {"attention_mask": [[1]]}, {}, "length=2"),
        ("GreedySearch", {}, {"model_type": 1}, "encoder and decoder_start_token_id"),
        ("GreedySearch", {}, {"model_type": 2}, "model_type"),
        ("GreedySearch", {}, {"vocab_size": 12}, "exceeds the decoder's 11 logits"),
        ("BeamSearch", {"num_return_sequences": [3]}, {}, "from 1 to num_beams"),
        ("BeamSearch", {"logits_processor": [1]}, {}, "logits_processor"),
        ("BeamSearch", {"decoder_input_ids": [[1]]}, {}, "decoder_input_ids"),
        ("Sampling", {"presence_mask": [[1] * 11]}, {}, "presence_mask"),
        ("Sampling", {}, {"custom": 1}, "custom"),
        ("Sampling", {}, {"presence_penalty": 0.5}, "presence_penalty"),
        ("Sampling", {}, {"n_outputs": 2}, "filtered_logits"),
    ],
)
def test_unsupported_options_are_rejected(
    operator: str, changes: dict[str, Any], attributes: dict[str, Any], said: str
) -> None:
    given = {n: np.array(v) for n, v in (WHOLE | changes).items()}
    inputs = [given.get(n) for n in NAMES[operator].split()]
    with pytest.raises((ValueError, NotImplementedError), match=said):
        run_op(operator, *inputs, domain=MICROSOFT, decoder=Session(gpt()), **TOKENS, **attributes)


def test_unknown_graph_signatures_are_rejected() -> None:
    other = Session(gpt())
    other.inputs[1].name = "mask"
    with pytest.raises(ValueError, match=r"decoder must begin with input_ids, position_ids"):
        run_op("GreedySearch", np.array([[1]]), np.array([3]), domain=MICROSOFT, decoder=other, **TOKENS)
    shared = Session(gpt())
    shared.inputs.append(shared.inputs[0])
    with pytest.raises(NotImplementedError, match="with a growing past"):
        run_op("GreedySearch", np.array([[1]]), np.array([3]), domain=MICROSOFT, decoder=shared, **TOKENS)

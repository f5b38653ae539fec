"""Decoders in the styles of exporters match onnxruntime with growing caches."""

from __future__ import annotations

import warnings

import jax
import numpy as np
import pytest
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax.errors import (
    CacheError,
    DeclarationWarning,
    InputNameError,
    InputShapeError,
    InputTypeError,
    UnsupportedError,
)
from onnx2jax.generation.cache import Kind
from tests.generation.shared import P, Q, decoder, file, greedy, logits
from tests.support import decoders
from tests.support.decoders import by_hand
from tests.support.models import model, value

ENCODED = np.random.default_rng(3).normal(size=(2, 4, decoders.HIDDEN)).astype(np.float32)

STYLES: dict[str, Kind] = {
    "group query, two layers": "shared",
    "group query, float16": "shared",
    "group query, 4 bits": "shared",
    "group query, 4 bits with zero points": "shared",
    "Concat": "appended",
    "Concat, two layers": "appended",
    "Concat, custom names": "appended",
    "Concat, uninformative names": "appended",
    "ScatterElements": "fixed",
    "TensorScatter": "fixed",
    "ScatterElements, mask of rank 4": "fixed",
    "Attention": "appended",
    "Attention, opset 24": "appended",
    "MultiHeadAttention": "appended",
}
QUICK = {
    "group query, two layers",
    "group query, 4 bits",
    "Concat",
    "ScatterElements",
    "ScatterElements, mask of rank 4",
}
"""One for each way to write a cache and to mask; the programs of most of them serve other tests too."""


@pytest.mark.parametrize("style", STYLES)
def test_caches_are_recognised(style: str) -> None:
    own = decoder(style)
    assert set(own.kinds.values()) == {STYLES[style]}
    assert {n: p.present for n, p in own.pairs.items()} == {n: p for n, (p, *_) in file(style).caches.items()}


@pytest.mark.parametrize("style", [pytest.param(s, marks=() if s in QUICK else pytest.mark.extended) for s in STYLES])
def test_batch_of_unequal_prompts_matches_each_alone(style: str) -> None:
    assert decoder(style).generate([P, Q], 8).texts() == [greedy(style, p, 8) for p in (P, Q)]


@pytest.mark.filterwarnings("ignore::onnx2jax.errors.RecompilationWarning")
def test_model_run_with_a_growing_cache_matches() -> None:
    own = onnx2jax.convert(file("Concat").proto)
    tokens, found = by_hand(file("Concat"), Q, 2, lambda feeds: own.run(None, feeds))
    assert tokens == greedy("Concat", Q, 2)
    np.testing.assert_allclose(found, logits("Concat", Q, 2), atol=1e-5)


def test_all_styles_are_the_same_network() -> None:
    """A fault in one of these files, or in one operator, would show."""
    same = [s for s in STYLES if "bits" not in s and "two" not in s]
    texts = [greedy(style, P, 6) for style in same]
    assert texts == [texts[0]] * len(same)


@pytest.mark.parametrize("merged", [False, True], ids=["two files", "merged"])
def test_after_an_encoder(merged: bool) -> None:
    later, first = (decoders.after_an_encoder(first=f).file() for f in (False, True))
    wanted = [
        by_hand(later, prompt, 8, first=first, encoder_hidden_states=ENCODED[i : i + 1])[0]
        for i, prompt in enumerate((P, Q))
    ]
    if merged:
        decoder = onnx2jax.decoder(onnx2jax.convert(decoders.merged().proto))
    else:
        decoder = onnx2jax.decoder(onnx2jax.convert(later.proto), prefill=onnx2jax.convert(first.proto))
    assert set(decoder.kinds.values()) == {"appended", "cross"}
    assert decoder.others == ("encoder_hidden_states",)
    assert decoder.generate([P, Q], 8, encoder_hidden_states=ENCODED).texts() == wanted


def test_weights_of_two_files_with_the_same_names() -> None:
    """Exporters number weights by node, so one name may mean different weights in the two files."""
    later, first = (decoders.after_an_encoder(first=f).file() for f in (False, True))
    original = decoders.after_an_encoder(first=True).file()
    wanted = by_hand(later, P, 4, first=first, encoder_hidden_states=ENCODED[:1])[0]
    swapped = {"0.q": "0.cross.q", "0.cross.q": "0.q"}
    for node in first.proto.graph.node:
        node.input[:] = [swapped.get(n, n) for n in node.input]
    for tensor in first.proto.graph.initializer:
        tensor.name = swapped.get(tensor.name, tensor.name)
    decoder = onnx2jax.decoder(onnx2jax.convert(later.proto), prefill=onnx2jax.convert(first.proto))
    assert {n for n in decoder.params if n.startswith("first/")} >= {"first/0.q", "first/0.cross.key"}
    texts = decoder.generate(P, 4, encoder_hidden_states=ENCODED[:1])
    assert texts.texts() == [wanted]
    more = by_hand(later, [*P, *wanted, 7, 8], 2, first=original, encoder_hidden_states=ENCODED[:1])[0]
    assert decoder.generate([7, 8], 2, after=texts).texts() == [more], "the cache holds the encoder's keys and values"
    with pytest.raises(InputNameError, match="'encoder_hidden_states' of the decoder is missing"):
        decoder.generate(P, 4)


def test_state_of_gated_delta_net() -> None:
    """With uninformative names, the operator determines which output is the next state."""
    rng, attributes = np.random.default_rng(0), {"domain": "com.microsoft", "update_rule": "linear"}
    constants = {"table": rng.normal(size=(11, 8)), "head": rng.normal(size=(6, 11))}
    constants |= {f"w_{name}": rng.normal(size=(8, 6)) for name in "qkv"}
    constants = {name: array.astype(np.float32) for name, array in constants.items()}
    constants |= {"heads": np.array([0, 0, 2, 3]), "flat": np.array([0, 0, 6])}
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["h"])]
    for name in "qkv":
        nodes.append(helper.make_node("MatMul", ["h", f"w_{name}"], [f"{name}_flat"]))
        nodes.append(helper.make_node("Reshape", [f"{name}_flat", "heads"], [name]))
    nodes += [
        helper.make_node("GatedDeltaNet", ["q", "k", "v", *[""] * 3, "a"], ["o", "b"], **attributes),
        helper.make_node("Reshape", ["o", "flat"], ["o_flat"]),
        helper.make_node("MatMul", ["o_flat", "head"], ["logits"]),
    ]
    state = ["batch", 2, 3, 3]
    inputs = [value("input_ids", np.int64, ["batch", "tokens"]), value("a", np.float32, state)]
    outputs = [value("logits", np.float32, ["batch", "tokens", 11]), value("b", np.float32, state)]
    made = onnx2jax.convert(model(nodes, inputs, outputs, constants, opsets={"com.microsoft": 1}))
    texts = onnx2jax.decoder(made).generate([1, 2, 3], 4).texts()
    whole = np.array([[1, 2, 3, *texts[0]]])
    found, _ = made(whole, np.zeros((1, 2, 3, 3), np.float32))
    assert np.asarray(found)[0, 2:-1].argmax(-1).tolist() == texts[0]


def test_state_of_a_convolution() -> None:
    """Padding would change it, so prompts must have equal lengths."""
    own = decoder("convolution")
    assert set(own.kinds.values()) == {"appended", "state"}
    wanted = [greedy("convolution", prompt, 8) for prompt in (P[:3], Q)]
    texts = own.generate([P[:3], Q], 8, stop=wanted[0][1])
    assert texts.texts() == [wanted[0][:2], wanted[1]]
    with pytest.raises(InputShapeError, match=r"texts of after have \[2, 8\] tokens"):
        own.generate([1], 1, after=texts)
    with pytest.raises(InputShapeError, match=r"prompts of \[3, 5\] tokens"):
        own.generate([P, Q], 8)


@pytest.mark.parametrize(
    "style",
    [
        pytest.param("Concat, positions from extents", marks=pytest.mark.extended),
        "Concat, positions from extents in each of two layers",
        pytest.param("ScatterElements, positions from slots", marks=pytest.mark.extended),
    ],
)
def test_models_without_a_position_input(style: str) -> None:
    """Texts of different lengths, by their prompts or by stopping early, continue in separate slots."""
    own, prompts = decoder(style), [P, P[::-1]]
    wanted = [greedy(style, prompt, 6) for prompt in (*prompts, Q, [7])]
    texts = own.generate(prompts, 6)
    assert (texts.texts(), texts.cache.apart) == (wanted[:2], False)
    more = [greedy(style, [*p, *t, 7, 11], 2) for p, t in zip(prompts, wanted, strict=False)]
    assert own.generate([[7, 11]] * 2, 2, after=texts).texts() == more
    uneven = own.generate([Q, [7]], 6)
    assert (uneven.texts(), uneven.cache.apart) == (wanted[2:], True)
    ended = own.generate(prompts, 6, stop=next(t for t in wanted[0] if t not in wanted[1]))
    assert len(set(ended.lengths.tolist())) > 1
    more = [greedy(style, [*p, *t, 7, 9], 2) for p, t in zip(prompts, ended.texts(), strict=True)]
    assert own.generate([[7, 9]] * 2, 2, after=ended).texts() == more


@pytest.mark.extended
def test_speculation_without_a_position_input() -> None:
    style = "Concat, positions from extents in each of two layers"
    assert decoder(style).speculate([P, Q], 4, decoder(style)).texts() == [greedy(style, p, 4) for p in (P, Q)]


def test_a_model_without_causal_masking_raises() -> None:
    net = decoders.Net(layers=2)

    def attend(net: decoders.Net, i: int, q: str, k: str, v: str) -> str:
        pairs = [(net.key_value(i, part), net.heads(x, decoders.KV_HEADS)) for part, x in (("key", k), ("value", v))]
        k, v = (net("Concat", past, new, axis=2, out=present) for (past, present), new in pairs)
        return net.attention(net.heads(q, decoders.HEADS), k, v)

    net.network(attend)
    own = onnx2jax.decoder(net.file().proto)
    for prompts in ([P, Q], [P, P]):
        with pytest.raises(CacheError, match="positions or its attention mask from the extent"):
            own.generate(prompts, 8)


@pytest.mark.parametrize("window", [4, pytest.param(63, marks=pytest.mark.extended)])
def test_a_window_measured_in_slots_is_right_aligned(window: int) -> None:
    style = f"Concat, window of {window}"
    own = decoder(style)
    wanted = [greedy(style, prompt, 8) for prompt in (P, Q)]
    texts = own.generate([P, Q], 8)
    assert texts.texts() == wanted
    assert texts.cache.aligned
    more = [greedy(style, [*p, *w, 7, 9], 3) for p, w in zip((P, Q), wanted, strict=True)]
    assert own.generate([[7, 9]] * 2, 3, after=texts).texts() == more
    ended = own.generate([P, Q], 8, stop=next(t for t in wanted[0] if t not in wanted[1]))
    assert ended.texts()[1] == wanted[1]
    with pytest.raises(InputShapeError, match="texts of after have"):
        own.generate([7], 1, after=ended)
    with pytest.raises(UnsupportedError, match="right-aligned cache, which cannot be rolled back"):
        own.speculate([P, Q], 4, own)


@pytest.mark.filterwarnings("ignore::onnx2jax.errors.RecompilationWarning")
def test_a_model_that_depends_on_extents_runs_with_a_growing_cache() -> None:
    file = decoders.appending(positions=False, window=4)
    own = onnx2jax.convert(file.proto)
    ours, theirs = by_hand(file, P, 2, lambda feeds: own.run(None, feeds)), by_hand(file, P, 2)
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)


def test_a_window_exceeded_only_by_extending_raises() -> None:
    style = "Concat, window of 64"
    own = decoder(style)
    beginning = own.read(P, 64)
    assert own.generate([7], 2, after=beginning).texts() == [greedy(style, [*P, 7], 2)]
    with pytest.raises(CacheError, match="differ"):
        own.generate([7, 9, 11, 1], 2, after=beginning)


def test_a_step_takes_one_token_of_each_sequence() -> None:
    found = decoder("group query")
    with pytest.raises(InputTypeError, match=r"tokens is int\d+ \(1, 1\), not one for each sequence, \(batch,\)"):
        found.step(found.params, found.empty_cache(1, 8), np.array([[3]]))


def test_declared_types_of_inner_values_are_not_compared() -> None:
    """Cache extents that the file leaves open are inferred from a query, whose declared type is not that of a call."""
    proto = decoders.group_query().proto
    node = next(n for n in proto.graph.node if n.op_type == "GroupQueryAttention")
    proto.graph.value_info.append(helper.make_tensor_value_info(node.input[1], TensorProto.FLOAT, ["b", "s", None]))
    caches = {*node.input[3:5], *node.output[1:]}
    for info in (v for v in (*proto.graph.input, *proto.graph.output) if v.name in caches):
        info.type.tensor_type.shape.dim[3].dim_param = "size"
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeclarationWarning)
        found = onnx2jax.decoder(proto, dtype="bfloat16")
    assert {a.shape[-1] for a in jax.tree.leaves(found.empty_cache(1, 4)) if a.ndim == 4} == {decoders.SIZE}


@pytest.mark.parametrize("style", ["group query", "Concat"])
def test_feeds_are_the_inputs_of_the_model(style: str) -> None:
    found = decoder(style)
    feeds = found.feeds([P, P[::-1]])
    every, *_ = found.model(feeds)
    np.testing.assert_allclose(every[0, -1], logits(style, P, 1)[0], rtol=1e-4, atol=1e-4)
    assert every.shape[:2] == (2, len(P)) and found.feeds(P, extra=1)["extra"] == 1
    with pytest.raises(InputShapeError, match=r"prompts of \[3, 5\] tokens: feeds has no padding"):
        found.feeds([P, Q])

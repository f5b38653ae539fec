"""Decoders in the styles of exporters match onnxruntime with growing caches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import helper

import onnx2jax
from onnx2jax.errors import CacheError, InputNameError, InputShapeError, UnsupportedError
from onnx2jax.generation.cache import Kind
from tests.support import decoders
from tests.support.decoders import File, by_hand, by_onnxruntime
from tests.support.models import model, value

P, Q = [5, 17, 3, 40, 8], [9, 2, 31]
ENCODED = np.random.default_rng(3).normal(size=(2, 4, decoders.HIDDEN)).astype(np.float32)

STYLES: dict[str, tuple[Callable[[], File], set[Kind]]] = {
    "group query, two layers": (lambda: decoders.group_query(layers=2), {"shared"}),
    "group query, float16": (lambda: decoders.group_query(np.float16), {"shared"}),
    "group query, 4 bits": (lambda: decoders.group_query(bits="symmetric"), {"shared"}),
    "group query, 4 bits with zero points": (lambda: decoders.group_query(bits="asymmetric"), {"shared"}),
    "Concat, two layers": (lambda: decoders.appending(layers=2), {"appended"}),
    "custom names": (lambda: decoders.appending(names=("cache_{1}_{0}", "cache_{1}_{0}_out")), {"appended"}),
    "uninformative names": (lambda: decoders.appending(names=("a{1}{0}", "b{1}{0}")), {"appended"}),
    "ScatterElements": (lambda: decoders.static(32), {"fixed"}),
    "TensorScatter": (lambda: decoders.static(32, writer="TensorScatter"), {"fixed"}),
    "ScatterElements, mask of rank 4": (lambda: decoders.static(32, mask_rank=4), {"fixed"}),
    "Attention": (decoders.onnx_attention, {"appended"}),
    "Attention, opset 24": (lambda: decoders.onnx_attention(24), {"appended"}),
    "MultiHeadAttention": (decoders.multi_head, {"appended"}),
}


@pytest.mark.parametrize("style", STYLES)
def test_batch_of_unequal_prompts_matches_each_alone(style: str) -> None:
    build, kinds = STYLES[style]
    file = build()
    decoder = onnx2jax.decoder(onnx2jax.convert(file.proto))
    assert set(decoder.kinds.values()) == kinds
    run = by_onnxruntime(file)
    wanted = [by_hand(file, prompt, 8, run)[0] for prompt in (P, Q)]
    assert decoder.generate([P, Q], 8).texts() == wanted


@pytest.mark.filterwarnings("ignore::onnx2jax.RecompilationWarning")
def test_generate_matches_model_run_with_a_growing_cache() -> None:
    file = decoders.appending()
    model = onnx2jax.convert(file.proto)
    tokens, _ = by_hand(file, Q, 3, lambda feeds: model.run(None, feeds))
    assert onnx2jax.decoder(model).generate(Q, 3).texts() == [tokens]


def test_all_styles_are_the_same_network() -> None:
    """A fault in one of these files, or in one operator, would show."""
    same = [b for n, (b, _) in STYLES.items() if "bits" not in n and "two" not in n]
    texts = [by_hand(build(), P, 6)[0] for build in same]
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
    tokens = [1, 2, 3]
    for _ in range(4):
        logits, _ = made(np.array([tokens]), np.zeros((1, 2, 3, 3), np.float32))
        tokens.append(int(np.asarray(logits)[0, -1].argmax()))
    assert onnx2jax.decoder(made).generate([1, 2, 3], 4).texts() == [tokens[3:]]


def test_state_of_a_convolution() -> None:
    """Padding would change it, so prompts must have equal lengths."""
    file = decoders.convolving()
    decoder = onnx2jax.decoder(onnx2jax.convert(file.proto))
    assert set(decoder.kinds.values()) == {"appended", "state"}
    run = by_onnxruntime(file)
    wanted = [by_hand(file, prompt, 8, run)[0] for prompt in (P[:3], Q)]
    texts = decoder.generate([P[:3], Q], 8, stop=wanted[0][1])
    assert texts.texts() == [wanted[0][:2], wanted[1]]
    with pytest.raises(InputShapeError, match=r"texts of after have \[2, 8\] tokens"):
        decoder.generate([1], 1, after=texts)
    with pytest.raises(InputShapeError, match=r"prompts of \[3, 5\] tokens"):
        decoder.generate([P, Q], 8)


@pytest.mark.parametrize(
    "build",
    [
        lambda: decoders.appending(positions=False),
        lambda: decoders.appending(positions=False, layers=2),
        lambda: decoders.static(32, positions=False),
    ],
    ids=["positions from extents", "positions from extents in each of two layers", "positions from slots"],
)
def test_models_without_a_position_input(build: Callable[[], File]) -> None:
    """Texts of different lengths, by their prompts or by stopping early, continue in separate slots."""
    file = build()
    decoder, run = onnx2jax.decoder(onnx2jax.convert(file.proto)), by_onnxruntime(file)
    wanted = [by_hand(file, prompt, 6, run)[0] for prompt in (P, P[::-1], Q, [7])]
    texts = decoder.generate([P, P[::-1]], 6)
    assert (texts.texts(), texts.cache.apart) == (wanted[:2], False)
    assert decoder.generate([[7], [7]], 2, after=texts).texts()[0] == by_hand(file, [*P, *wanted[0], 7], 2, run)[0]
    uneven = decoder.generate([Q, [7]], 6)
    assert (uneven.texts(), uneven.cache.apart) == (wanted[2:], True)
    ended = decoder.generate([P, P[::-1]], 6, stop=next(t for t in wanted[0] if t not in wanted[1]))
    assert len(set(ended.lengths.tolist())) > 1
    more = [by_hand(file, [*p, *t, 7, 9], 2, run)[0] for p, t in zip((P, P[::-1]), ended.texts(), strict=True)]
    assert decoder.generate([[7, 9], [7, 9]], 2, after=ended).texts() == more
    assert decoder.speculate([P, Q], 2, decoder).texts() == [wanted[0][:2], wanted[2][:2]]


def test_a_model_without_causal_masking_raises() -> None:
    net = decoders.Net(layers=2)

    def attend(net: decoders.Net, i: int, q: str, k: str, v: str) -> str:
        pairs = [(net.key_value(i, part), net.heads(x, decoders.KV_HEADS)) for part, x in (("key", k), ("value", v))]
        k, v = (net("Concat", past, new, axis=2, out=present) for (past, present), new in pairs)
        return net.attention(net.heads(q, decoders.HEADS), k, v)

    net.network(attend)
    decoder = onnx2jax.decoder(onnx2jax.convert(net.file().proto))
    for prompts in ([P, Q], [P, P]):
        with pytest.raises(CacheError, match="positions or its attention mask from the extent"):
            decoder.generate(prompts, 8)


@pytest.mark.parametrize("window", [4, 63])
def test_a_window_measured_in_slots_is_right_aligned(window: int) -> None:
    file = decoders.appending(window=window)
    decoder, run = onnx2jax.decoder(onnx2jax.convert(file.proto)), by_onnxruntime(file)
    wanted = [by_hand(file, prompt, 8, run)[0] for prompt in (P, Q)]
    texts = decoder.generate([P, Q], 8)
    assert texts.texts() == wanted
    assert texts.cache.aligned
    more = [by_hand(file, [*p, *w, 7, 9], 3, run)[0] for p, w in zip((P, Q), wanted, strict=True)]
    assert decoder.generate([[7, 9]] * 2, 3, after=texts).texts() == more
    ended = decoder.generate([P, Q], 8, stop=next(t for t in wanted[0] if t not in wanted[1]))
    assert ended.texts()[1] == wanted[1]
    with pytest.raises(InputShapeError, match="texts of after have"):
        decoder.generate([7], 1, after=ended)
    with pytest.raises(UnsupportedError, match="right-aligned cache, which cannot be rolled back"):
        decoder.speculate([P, Q], 4, decoder)


@pytest.mark.filterwarnings("ignore::onnx2jax.RecompilationWarning")
def test_a_model_that_depends_on_extents_runs_with_a_growing_cache() -> None:
    file = decoders.appending(positions=False, window=4)
    model = onnx2jax.convert(file.proto)
    ours, theirs = by_hand(file, P, 3, lambda feeds: model.run(None, feeds)), by_hand(file, P, 3)
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)


def test_a_window_exceeded_only_by_extending_raises() -> None:
    decoder = onnx2jax.decoder(onnx2jax.convert(decoders.appending(window=64).proto))
    beginning = decoder.read(P, 64)
    assert decoder.generate([7], 2, after=beginning).texts() == [by_hand(decoders.appending(window=64), [*P, 7], 2)[0]]
    with pytest.raises(CacheError, match="differ"):
        decoder.generate([7, 9, 11, 1], 2, after=beginning)

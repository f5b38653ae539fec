"""generate, stream and read: prompts, stop sequences, continuations, and the number of compilations."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import numpy_helper

import onnx2jax
from onnx2jax import Decoder, Sampling, compat
from onnx2jax.errors import (
    CacheError,
    InputError,
    InputNameError,
    InputShapeError,
    InputTypeError,
    InputValueError,
    UnsupportedError,
)
from onnx2jax.generation import loop, verified
from onnx2jax.jaxpr.pipeline import Passes
from onnx2jax.runtime import params
from tests.generation import shared
from tests.generation.shared import P, Q, file, greedy, logits
from tests.support import decoders
from tests.support.decoders import by_hand
from tests.support.models import mlp, value

STYLE = "group query, two layers"


def wanted(*prompt: int, count: int = 10) -> list[int]:
    """Greedy tokens after a prompt, by onnxruntime."""
    return greedy(STYLE, prompt, count)


@pytest.fixture
def decoder() -> Decoder:
    return shared.decoder(STYLE)


@pytest.fixture
def fixed() -> Decoder:
    return shared.decoder("ScatterElements")


def test_other_lengths_and_settings_do_not_recompile() -> None:
    own = onnx2jax.decoder(file("group query").proto)
    assert own.compilations == 0
    own.generate([P, Q], 10)
    assert own.compilations == 2
    own.generate([Q, [1]], 3, stop=[[7], [8, 9]], rng=5)
    own.generate([[2] * 16, P], 40, stop=())
    list(own.stream([P, Q], 4))
    assert own.compilations == 2
    own.generate([P, Q], 3, sampling="temperature")
    assert own.compilations == 4
    own.generate([P, Q], 3, sampling=Sampling(temperature=0.3, top_k=7, top_p=0.8, min_p=0.1), rng=1)
    own.generate([P, Q], 7, sampling="top_p", stop=4)
    assert own.compilations == 4


def test_prompts_and_counts_of_other_types(decoder: Decoder) -> None:
    """An iterator is read once, and whole numbers may be floats or arrays."""
    want = [wanted(*P, count=3), wanted(*Q, count=3)]
    assert decoder.generate(iter([P, Q]), 3).texts() == want
    assert decoder.generate([P, Q], np.array([3.0]), length=64.0).texts() == want  # type: ignore[arg-type]


def test_each_cache_layout_is_verified_on_resuming(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs differently on sequences apart, so what held for shared slots says nothing of them."""
    own, style, calls = shared.decoder("group query"), "group query", []
    check = verified.check_close
    monkeypatch.setattr(verified, "check_close", lambda *a, **k: (calls.append(1), check(*a, **k)))
    together = own.read([P, Q], 32)  # a length of this test alone
    apart = replace(together, cache=replace(together.cache, apart=True))
    for before, count in ((together, 1), (apart, 1), (together, 0), (apart, 0)):
        calls.clear()
        texts = own.generate([[1, 4, 6], [7, 2, 6]], 3, after=before).texts()
        assert texts == [greedy(style, [*P, 1, 4, 6], 3), greedy(style, [*Q, 7, 2, 6], 3)]
        assert len(calls) == count


LEFT = np.array([P, [0, 0, *Q]]), np.array([[1] * 5, [0, 0, 1, 1, 1]])
RIGHT = np.array([P, [*Q, 0, 0]]), np.array([[1] * 5, [1, 1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("tokens", "mask"),
    [([P, Q], None), ([np.array(P), np.array(Q)], None), LEFT, RIGHT, tuple(map(jnp.asarray, RIGHT))],
    ids=["lists", "arrays", "left-padded", "right-padded", "JAX arrays"],
)
def test_prompts_of_a_batch(decoder: Decoder, tokens: Any, mask: Any) -> None:
    masked = {} if mask is None else {"attention_mask": mask}
    texts = decoder.generate(tokens, 10, **masked)
    assert texts.texts() == [wanted(*P), wanted(*Q)]
    assert (texts.tokens.dtype, texts.tokens.shape, texts.lengths.tolist()) == (np.int64, (2, 10), [10, 10])


def test_one_prompt(decoder: Decoder) -> None:
    for tokens in (Q, np.array(Q, np.int32), [Q], jnp.array([Q])):
        assert decoder.generate(tokens, 4).texts() == [wanted(*Q)[:4]]


def test_the_stop_token_is_the_last_token(decoder: Decoder) -> None:
    one, two = wanted(*P), wanted(*Q)
    stop = one[3]
    assert stop not in two and stop not in one[:3]
    texts = decoder.generate([P, Q], 10, stop=stop)
    assert texts.texts() == [one[:4], two]
    assert texts.lengths.tolist() == [4, 10]
    assert texts.tokens[0, 4:].tolist() == [decoder.pad] * 6
    assert texts.last.tolist() == [[stop], [two[-1]]]


def test_a_stop_sequence_of_several_tokens(decoder: Decoder) -> None:
    one, two = wanted(*P), wanted(*Q)
    assert decoder.generate([P, Q], 10, stop=[one[2:5]]).texts() == [one[:5], two]
    assert decoder.generate([P, Q], 10, stop=[[one[2], one[4]]]).texts() == [one, two], "not adjacent"
    assert decoder.generate([P, Q], 10, stop=[[P[-1], one[0]]]).texts() == [one, two], "begins in the prompt"
    assert decoder.generate([P, Q], 10, stop=[two[:2], [one[5]]]).texts() == [one[: one.index(one[5]) + 1], two[:2]]


def test_the_loop_ends_when_all_texts_have_ended(decoder: Decoder) -> None:
    texts = decoder.generate([P, Q], 10, stop=[wanted(*P)[0], wanted(*Q)[1]])
    assert texts.tokens.shape == (2, 2)
    assert texts.texts() == [wanted(*P)[:1], wanted(*Q)[:2]]


@pytest.mark.parametrize("sampling", ["greedy", "temperature"])
def test_stream_yields_the_tokens_of_generate(decoder: Decoder, sampling: str) -> None:
    options: dict[str, Any] = {"sampling": sampling, "stop": wanted(*P)[3], "rng": 4}
    texts = decoder.generate([P, Q], 10, **options)
    assert np.array_equal(np.stack(list(decoder.stream([P, Q], 10, **options)), axis=1), texts.tokens)


def test_continues_a_generation(decoder: Decoder) -> None:
    """Also a text that ended before the others."""
    one, two = wanted(*P), wanted(*Q)
    texts = decoder.generate([P, Q], 6, stop=one[3], length=64)
    further = decoder.generate([[7, 9], [11, 1]], 5, after=texts, stop=())
    assert further.texts() == [wanted(*P, *one[:4], 7, 9)[:5], wanted(*Q, *two[:6], 11, 1)[:5]]
    again = decoder.generate([[4, 4], [6, 6]], 2, after=further)
    assert again.texts()[0] == wanted(*P, *one[:4], 7, 9, *further.texts()[0], 4, 4)[:2]


def test_several_continuations_share_a_read_prompt(decoder: Decoder) -> None:
    beginning = decoder.read([P, Q], 64)
    assert beginning.tokens.shape == (2, 0)
    for more in ([7], [8], [7]):
        texts = decoder.generate([more, more], 3, after=beginning).texts()
        assert texts == [wanted(*P, *more)[:3], wanted(*Q, *more)[:3]]
    assert decoder.generate([7], 3, after=beginning).texts() == [wanted(*P, 7)[:3], wanted(*Q, 7)[:3]], (
        "one prompt is repeated for the batch"
    )


def test_a_sampling_function(decoder: Decoder) -> None:
    """It is traced for all platforms: if it is jitted, JAX keeps the trace for other callers."""
    platforms = set[str]()

    def unlikeliest(row: jax.Array, key: jax.Array) -> jax.Array:  # noqa: ARG001
        platforms.add(compat.platform())
        return jnp.argmin(row, axis=-1)

    (token,) = decoder.generate(Q, 1, sampling=unlikeliest).texts()[0]
    assert token == int(logits(STYLE, Q, 1).argmin())
    assert platforms == {""}


def test_threads_share_a_decoder(decoder: Decoder) -> None:
    prompts: Sequence[list[list[int]]] = [[P, Q], [Q, P]] * 4
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda p: decoder.generate(p, 10).texts(), prompts))
    assert texts == [[wanted(*one), wanted(*two)] for one, two in prompts]


@pytest.mark.parametrize("bits", [False, True], ids=["32", "64"])
def test_tokens_are_the_same_in_32_and_64_bits(decoder: Decoder, bits: bool) -> None:
    with jax.enable_x64(bits):
        texts = decoder.generate([P, Q], 10)
    assert texts.tokens.dtype == np.int64
    assert texts.texts() == [wanted(*P), wanted(*Q)]


def beyond(logits: jax.Array, key: jax.Array) -> jax.Array:  # noqa: ARG001
    """Tokens outside of the vocabulary."""
    return logits.argmax(-1) + 100


def forgets(tokens: jax.Array, logits: jax.Array) -> None:
    """A processor without a return."""


def one_sided(logits: jax.Array) -> jax.Array:
    return logits


def branching(tokens: jax.Array, logits: jax.Array) -> jax.Array:
    return logits if tokens[0, 0] > 0 else -logits


@dataclass
class Unhashable:
    def __call__(self, tokens: jax.Array, logits: jax.Array) -> jax.Array:  # noqa: ARG002
        return logits


BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([], {}, InputError, "tokens is empty|one token id or more"),
    ([P, []], {}, InputValueError, "prompt 1 is"),
    ([1.5, 2.0], {}, InputValueError, "as integers"),
    ("text", {}, InputValueError, "no tokenizer.json beside the model: pass token ids"),
    (["text", [1]], {}, InputValueError, r"prompt 0 is a text, and prompt 1 is \[1\]: .*decoder\.encode\(text\)"),
    ([[1, 2], "text"], {}, InputValueError, r"prompt 1 is a text, and prompt 0 is \[1, 2\]"),
    ([{"role": "user", "content": "a"}, [1]], {}, InputValueError, r"\[text, \[message\]\]"),
    ({"role": "user", "content": "a"}, {}, InputValueError, r"the prompt is a dict, .* list of messages, \[message\]"),
    ({"input_ids": [P]}, {}, InputValueError, r"generate\(d\['input_ids'\], attention_mask=d"),
    (np.array(["a", "b"]), {}, InputValueError, "text needs a tokenizer"),
    ([[[1]]], {}, InputValueError, "one token id or more"),
    ([1, 61], {}, InputValueError, "tokens from 1 to 61; tokens are 0 to 60"),
    ([-1, 2], {}, InputValueError, "tokens from -1"),
    (P, {"max_new_tokens": 0}, InputValueError, "max_new_tokens is 0"),
    (P, {"max_new_tokens": 2.5}, InputValueError, r"max_new_tokens is 2\.5"),
    (P, {"length": 10}, InputShapeError, "14 tokens, and the cache has room for 10: length=14"),
    (P, {"max_new_tokens": 200}, InputShapeError, "205 tokens, and the model supports 128"),
    (
        P,
        {"attention_mask": [1, 1]},
        InputShapeError,
        r"attention_mask \(1, 2\) does not match the tokens' shape \(1, 5\)",
    ),
    (P, {"attention_mask": [0] * 5}, InputValueError, "prompt 0 is"),
    (P, {"pixels": np.zeros(3)}, InputNameError, "no input 'pixels'"),
    (P, {"sampling": "beam"}, InputValueError, "'greedy', 'temperature'"),
    (P, {"sampling": 3}, InputValueError, "a name, Sampling"),
    (P, {"stop": -1}, InputValueError, "stop is -1"),
    (P, {"stop": [[]]}, InputValueError, r"stop is \[\[\]\]"),
    (P, {"stop": "end"}, InputValueError, "text needs a tokenizer"),
    (P, {"stop": [1, ""]}, InputValueError, "an empty string ends every text"),
    (P, {"stop": [1.5]}, InputValueError, r"stop is \[1\.5\]"),
    (P, {"stop": [[1], [[2]]]}, InputValueError, "stop is"),
    (P, {"stop": 2**40}, InputValueError, "stop is 1099511627776"),
    (P, {"stop": 61}, InputValueError, "stop has token 61; tokens are 0 to 60"),
    (None, {}, InputValueError, r"tokens is None: token ids of a prompt, \[5, 17, 3\]"),
    (5, {}, InputValueError, "tokens is 5"),
    (P, {"max_new_tokens": "3"}, InputValueError, "max_new_tokens is '3'"),
    (P, {"max_new_tokens": True}, InputValueError, "max_new_tokens is True"),
    (P, {"length": 19.5}, InputValueError, r"length is 19\.5; it is a whole number"),
    ([P, P[:2]], {"attention_mask": np.ones((2, 5))}, InputShapeError, r"shape 2 lists of \[2, 5\] tokens"),
    (P, {"sampling": Sampling}, InputValueError, "a name, Sampling"),
    (P, {"sampling": lambda logits, _: logits.argmax()}, InputValueError, r"sampling returns int64 \(\), .* \(1,\)"),
    (P, {"sampling": lambda logits, _: logits[:, 0]}, InputValueError, "sampling returns float32"),
    (P, {"sampling": beyond}, InputValueError, "tokens are 0 to 60"),
    (P, {"stop": True}, InputValueError, "stop is True"),
    (P, {"after": [1]}, InputTypeError, "after is list"),
    ([[1, [2]]], {}, InputValueError, r"prompt 0 is \[1, \[2\]\], which is no array"),
    (P, {"attention_mask": "all"}, InputValueError, "attention_mask is 'all'"),
    ([P, P[:2]], {"attention_mask": [[1] * 5, [1] * 2]}, InputValueError, "attention_mask is .* no array"),
    (P, {"input_ids": "image"}, InputTypeError, "input 'input_ids' is 'image', not an array"),
    (P, {"do_sample": True}, InputNameError, "no keyword 'do_sample': use sampling='temperature'"),
    (P, {"num_beams": 4}, InputNameError, r"use decoder\.beam_search\(prompt, beams="),
    (P, {"eos_token_id": 2}, InputNameError, "use stop="),
    (P, {"temprature": 1}, InputNameError, "did you mean 'temperature'"),
    (P, {"repetition_penalty": 0}, InputValueError, "repetition_penalty is 0"),
    (P, {"logits_processors": [3]}, InputValueError, "logits_processors has 3"),
    (P, {"logits_processors": [lambda _, logits: logits[:, :3]]}, InputValueError, r"returns float32 \(1, 3\)"),
    (
        P,
        {"logits_processors": [forgets]},
        InputValueError,
        r"logits_processors\[0\] 'forgets' returns None, not an array",
    ),
    (
        P,
        {"logits_processors": [np.asarray, one_sided]},
        InputTypeError,
        r"\[1\] 'one_sided' is called with \(tokens_so",
    ),
    (P, {"logits_processors": branching}, InputTypeError, r"\[0\] 'branching' needs .* jnp\.where rather than if"),
    (P, {"logits_processors": [lambda _, x: np.asarray(x)]}, InputTypeError, r"'<lambda>' needs .* pure JAX"),
    (P, {"logits_processors": [lambda _, x: x[x > 0]]}, InputTypeError, r"'<lambda>' needs .* pure JAX"),
    (P, {"logits_processors": [Unhashable()]}, InputTypeError, r"'Unhashable' has no hash.*dataclass\(frozen=True\)"),
    (
        P,
        {"sampling": one_sided},
        InputTypeError,
        r"sampling 'one_sided' is called with \(logits, key\), and takes \(logits\)",
    ),
    (P, {"sampling": branching}, InputTypeError, r"sampling 'branching' needs .* jnp\.where rather than if"),
    (P, {"sampling": forgets}, InputValueError, r"sampling 'forgets' returns None"),
    (P, {"logprobs": 5}, InputValueError, "logprobs is 5"),
    (P, {"rng": "seed"}, onnx2jax.errors.OnnxError, "rng|seed|key"),
]


def test_invalid_arguments_raise(decoder: Decoder, subtests: pytest.Subtests) -> None:
    for tokens, options, error, message in BAD:
        count = options.get("max_new_tokens", 9)
        with subtests.test(tokens=tokens, **options), pytest.raises(error, match=message):
            decoder.generate(tokens, count, **{n: v for n, v in options.items() if n != "max_new_tokens"})


def test_keywords_that_a_method_does_not_take_raise(decoder: Decoder, subtests: pytest.Subtests) -> None:
    """They neither have an effect on the first token alone, nor reach a private function."""
    for method, keyword, fix in (
        (decoder.beam_search, {"sampling": "top_p"}, r"use decoder\.generate\(\.\.\., sampling=\)"),
        (decoder.beam_search, {"repetition_penalty": 2.0}, r"use decoder\.generate\(\.\.\., repetition_penalty=\)"),
        (
            partial(decoder.speculate, draft=decoder),
            {"rng": 3},
            r"use decoder\.generate\(\.\.\., sampling=\.\.\., rng=\)",
        ),
        (decoder.stream, {"logprobs": True}, r"use decoder\.generate\(\.\.\., logprobs=True\)"),
        (decoder.read, {"stop": 3}, "read has no keyword 'stop'"),
        (decoder.generate, {"spare": 3}, "generate has no keyword 'spare'"),
        (decoder.generate, {"count": 3}, "generate has no keyword 'count'"),
    ):
        with subtests.test(**keyword), pytest.raises(InputNameError, match=fix):
            list(method(P, 8, **keyword))


def test_generate_inside_jit_raises(decoder: Decoder) -> None:
    """With a traced argument, and with concrete arguments inside a jit."""
    for function in (lambda x: decoder.generate(x, 3).tokens, lambda x: x + decoder.generate(P, 3).tokens[0, 0]):
        with pytest.raises(InputTypeError, match=r"decoder\.prefill and decoder\.step"):
            jax.jit(function)(np.array([P]))


def test_other_errors_of_a_logits_processor_name_it(decoder: Decoder) -> None:
    def unfinished(tokens: jax.Array, logits: jax.Array) -> jax.Array:
        raise NotImplementedError

    with pytest.raises(NotImplementedError) as error:
        decoder.generate(P, 3, logits_processors=[unfinished])
    assert error.value.__notes__ == ["inside logits_processors[0] 'unfinished'"]


def test_stream_checks_the_tokens_of_a_sampling_function(decoder: Decoder) -> None:
    with pytest.raises(InputValueError, match="tokens are 0 to 60"):
        next(decoder.stream(P, 3, sampling=beyond))


def test_the_padding_token_may_be_outside_the_vocabulary(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """No embedding is looked up for it, also when a text that ended early is continued."""
    assert onnx2jax.decoder(file(STYLE).proto, pad=-100).pad == -100
    monkeypatch.setattr(decoder, "pad", -100)  # an operand of its programs
    one = wanted(*P)
    texts = decoder.generate([P, Q], 6, stop=one[1], length=64)
    assert texts.tokens[0, 2:].tolist() == [-100] * 4
    assert decoder.generate([[7], [7]], 3, after=texts).texts()[0] == wanted(*P, *one[:2], 7)[:3]


def test_logits_of_minus_infinity_and_nan() -> None:
    """A model may forbid tokens by -inf; NaN raises."""
    own = decoders.group_query(np.float16)
    last = own.proto.graph.node[-1]
    last.op_type, last.output[0] = "Add", "logits"
    bias = np.zeros(decoders.VOCABULARY, np.float16)
    last.input.append("bias")
    bias[wanted(*P)[:2]] = -np.inf
    own.proto.graph.initializer.append(numpy_helper.from_array(bias, "bias"))
    model = onnx2jax.convert(own.proto)
    assert onnx2jax.decoder(model).generate(P, 5).texts() == [by_hand(own, P, 5)[0]]
    with pytest.raises(CacheError, match=r"NaN, or all -inf: the model overflows"):
        onnx2jax.decoder(model.with_params({"bias": np.full_like(bias, np.nan)})).generate(P, 5)


@pytest.fixture(scope="module")
def overflowing() -> Decoder:
    """A decoder whose logits are NaN from the position 12 on, as where float16 overflows at a later token."""
    good = onnx2jax.decoder(onnx2jax.demo_decoder())
    table = np.array(good.params["cos_cache"])
    table[12:] = np.nan
    leaves, tree = jax.tree_util.tree_flatten_with_path(good)
    bad: Decoder = jax.tree.unflatten(tree, [table if "cos_cache" in str(path) else leaf for path, leaf in leaves])
    return bad


@pytest.mark.parametrize("method", ["generate", "stream", "beam_search", "speculate", "read"])
def test_logits_that_become_nan_are_an_error(overflowing: Decoder, method: str) -> None:
    """Rather than token 0."""
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: overflowing.generate("seven ", 20),
        "stream": lambda: "".join(overflowing.stream("seven ", 20)),
        "beam_search": lambda: overflowing.beam_search("seven ", 20, beams=2),
        "speculate": lambda: overflowing.speculate("seven ", 20, overflowing),
        "read": lambda: overflowing.read("seven eight nine ", 64),
    }
    with pytest.raises(CacheError, match="all -inf: the model overflows, or an input or weight is NaN"):
        calls[method]()
    if method == "generate":
        assert overflowing.generate("seven ", 6) == "eight "
        with pytest.raises(CacheError, match=r"^text 1, token 2: "):
            overflowing.generate([list(b"one "), list(b"seven eight ")], 20)
        with jax.debug_nans(True), pytest.raises(CacheError, match=r"^text 0, token 8: "):
            overflowing.generate("seven ", 20)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_processors_that_leave_no_token_are_an_error(value: float) -> None:
    counting = onnx2jax.decoder(onnx2jax.demo_decoder())
    third = [lambda tokens, logits: jnp.where((tokens >= 0).sum(1, keepdims=True) > 7, value, logits)]
    with pytest.raises(InputValueError, match=r"^text 0, token 3: logits_processors leave no token, as all logits"):
        counting.generate("seven ", 6, logits_processors=third)


def test_decoder_checks_its_settings() -> None:
    model = onnx2jax.convert(file(STYLE).proto)
    for settings, message in (
        ({"stop": 61}, "stop has token 61"),
        ({"context": 0}, "context is 0"),
        ({"pad": "x"}, "pad is 'x'"),
    ):
        with pytest.raises(InputValueError, match=message):
            onnx2jax.decoder(model, **settings)


def test_continuations_that_do_not_fit_raise(decoder: Decoder) -> None:
    beginning = decoder.read([P, Q], 64)
    with pytest.raises(InputShapeError, match="room for 64: begin with length=75"):
        decoder.generate([[1] * 30] * 2, 40, after=beginning)
    with pytest.raises(InputShapeError, match="room for 64"):
        decoder.generate([[1] * 80] * 2, 1, after=beginning, repetition_penalty=2)
    with pytest.raises(InputValueError, match="a cache of length 64; for another, begin with length=128"):
        decoder.generate([[1], [2]], 1, after=beginning, length=128)
    with pytest.raises(InputShapeError, match="3 prompts cannot continue 2 texts"):
        decoder.generate([[1], [2], [3]], 1, after=beginning)
    with pytest.raises(InputShapeError, match=r"prompts of \[1, 2\] tokens"):
        decoder.generate([[1], [2, 2]], 1, after=beginning)


def test_a_result_of_another_decoder_does_not_continue() -> None:
    """It is named, also if its caches are alike. Weights may be others, and the same file be read again."""
    own = shared.decoder("group query")
    before = own.read([P, Q], 64)
    for style, named in (
        (STYLE, "it has no cache where this one has cache 'past_key_values.1.key' of float32"),
        ("Concat, custom names", "it has cache 'past_key_values.0.key' of .* where this one has cache 'cache_"),
        ("group query, 4 bits", "its graph, 'main' too, has other nodes"),
    ):
        with pytest.raises(InputValueError, match=f"after is a result of another decoder: {named}") as error:
            shared.decoder(style).generate([[7], [8]], 3, after=before)
    with pytest.raises(InputValueError, match="its graph is 'main', and this one is 'counting'"):
        onnx2jax.decoder(onnx2jax.demo_decoder()).generate("nine ", 3, after=before)
    want = [greedy("group query", [*P, 7], 3), greedy("group query", [*Q, 8], 3)]
    advice = str(error.value).partition("from all tokens: ")[2]
    assert own.generate(eval(advice, {"after": before, "tokens": [[7], [8]]}), 3).texts() == want
    again = jax.tree.map(lambda v: v, onnx2jax.decoder(shared.file("group query").proto))
    assert again.generate([[7], [8]], 3, after=pickle.loads(pickle.dumps(before))).texts() == want


def test_the_declared_cache_length_is_used(fixed: Decoder) -> None:
    assert fixed.fixed_length == 32
    assert fixed.read([P, Q], 32).cache.length == 32
    with pytest.raises(UnsupportedError, match="caches of length 32, not 64: length=32"):
        fixed.generate(P, 9, length=64)
    with pytest.raises(InputShapeError, match="35 tokens, and the cache has room for 32"):
        fixed.generate(P, 30)


def test_a_model_that_is_not_a_decoder_raises() -> None:
    with pytest.raises(UnsupportedError, match="model 'main' has no token input"):
        onnx2jax.decoder(onnx2jax.convert(mlp()))
    without, *_ = decoders.after_an_encoder(first=True).file(), None
    with pytest.raises(UnsupportedError, match=r"has no KV cache.*with-past"):
        onnx2jax.decoder(onnx2jax.convert(without.proto))


def test_an_unrecognised_cache_is_a_missing_input() -> None:
    """Its output is not computed by appending, and has an unrelated name."""
    proto = decoders.appending().proto
    proto.graph.node.add(op_type="Neg", input=["memory"], output=["remembered"])
    proto.graph.input.append(value("memory", np.float32, ["batch_size", 4]))
    proto.graph.output.append(value("remembered", np.float32, ["batch_size", 4]))
    decoder = onnx2jax.decoder(onnx2jax.convert(proto))
    assert decoder.others == ("memory",)
    with pytest.raises(InputNameError, match="input 'memory' of the decoder is missing: pass memory=array"):
        decoder.generate(P, 2)


def test_programs_for_a_gpu_hoist_and_are_stored_as_lowered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Passes] = []

    def recorded(*args: Any, **options: Any) -> Passes:
        made.append(Passes(*args, **options))
        return made[-1]

    monkeypatch.setattr(loop, "Passes", recorded)
    monkeypatch.setattr(params, "is_cpu", lambda _: False)
    monkeypatch.setattr(loop.compat, "lowering_platform", lambda _: "cuda")
    stored = []
    for _ in range(2):
        decoder = onnx2jax.decoder(onnx2jax.demo_decoder(), cache_dir=tmp_path)
        assert bytes(decoder.generate(list(b"one two "), 8).texts()[0]) == b"three fo"
        stored.append({*tmp_path.iterdir()})
    assert {o.platform for o in made} == {"cuda"}
    assert len(stored[0]) == 2 and stored[0] == stored[1]

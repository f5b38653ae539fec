"""Prompts that are text: tokenizers, chat templates, stop strings; penalties, logits processors, log-probabilities."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, processors

import onnx2jax
from onnx2jax import Decoder
from onnx2jax.errors import InputNameError, InputTypeError, InputValueError
from onnx2jax.generation.sampling import Choice, processed
from onnx2jax.generation.text import Text
from onnx2jax.generation.text import Tokenizer as Ours
from tests.generation import shared
from tests.generation.shared import P, Q, greedy, logits

STYLE = "group query, two layers"
PROMPTS = ["nineteen twenty ", "seven "]
TEXTS = ["twenty-one twenty-two ", "eight nine ten eleven "]


@pytest.fixture(scope="module")
def counting() -> Decoder:
    return onnx2jax.decoder(onnx2jax.demo_decoder().parent)


def test_text_for_text(counting: Decoder) -> None:
    assert counting.generate(PROMPTS[0], 22) == TEXTS[0]
    assert counting.generate(PROMPTS, 22) == TEXTS
    assert "".join(counting.stream(PROMPTS[1], 22)) == TEXTS[1]
    assert list(map("".join, zip(*counting.stream(PROMPTS, 22), strict=True))) == TEXTS
    tokens = counting.encode(PROMPTS[1])
    assert counting.decode(counting.generate(tokens, 22).texts()) == TEXTS[1]


def test_beams_and_drafts_return_text(counting: Decoder) -> None:
    assert counting.beam_search(PROMPTS[0], 22, beams=2) == TEXTS[0]
    assert counting.speculate(PROMPTS[0], 22, draft=counting) == TEXTS[0]
    with pytest.raises(InputValueError, match=r"strings stop generate and stream"):
        counting.beam_search(PROMPTS[0], 22, stop="two")


def test_stop_strings(counting: Decoder) -> None:
    """They lie across tokens, end each text apart, and leave caches that continue."""
    assert counting.generate(PROMPTS, 22, stop=["y-o", "ten"]) == ["twenty-o", "eight nine ten"]
    assert "".join(counting.stream(PROMPTS[0], 22, stop="one")) == "twenty-one"
    ended = counting.generate([counting.encode(p) for p in PROMPTS], 22, stop=["y-o", "ten"])
    assert list(map(bytes, ended.texts())) == [b"twenty-o", b"eight nine ten"]
    (more,) = counting.generate([list(b" eleven ")] * 2, 7, after=ended).texts()[1:]
    assert bytes(more) == b"twelve "
    assert counting.generate(PROMPTS[0], 22, stop=[ord("-"), "one"]) == "twenty-"


def test_the_default_maximum_is_what_there_is_room_for(counting: Decoder) -> None:
    assert len(counting.generate("one ")) == 128
    assert len(counting.generate("one ", length=64)) == 60
    assert counting.generate(list(b"one "), length=16).lengths == [12]
    began = counting.read("one two ", 32)
    assert counting.generate(list(b"three "), after=began).lengths == [18]
    assert counting.generate("three ", 5, after=began) == "four "


def test_a_conversation_by_the_chat_template(counting: Decoder) -> None:
    talk = [{"role": "user", "content": "nineteen twenty"}]
    assert counting.generate(talk, 11) == "twenty-one "
    assert counting.generate([talk, [{"role": "user", "content": "seven"}]], 6) == ["twenty", "eight "]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "prompt 0 is an empty text"),
        (["one ", ""], "prompt 1 is an empty text"),
        ([], "prompt 0 is empty"),
        (
            [{"rolle": "user", "content": "hi"}],
            "message 0 is .*rolle.* needs 'role' and 'content'; .*mean 'role'",
        ),
        ([{"role": "user", "content": None}], "message 0 is .*; it needs 'role' and 'content'$"),
        ([[{"role": "user"}]], "message 0 is .*; it needs 'role' and 'content'$"),
    ],
)
def test_prompts_without_text_are_rejected(counting: Decoder, prompt: Any, said: str) -> None:
    with pytest.raises(InputValueError, match=said):
        counting.generate(prompt, 4)


def test_templates_as_models_have_them(tmp_path: Path) -> None:
    """Names of several templates, special tokens in dicts, generation blocks, and rejected conversations."""
    shutil.copy(onnx2jax.demo_decoder().parent / "tokenizer.json", tmp_path)
    text = (
        "{{ bos_token }}{% for m in messages %}\n{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{%- generation %}{{ m.content | tojson }}{% endgeneration %}{% if loop.last %}{% break %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    facts = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": text}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
    own = Ours(tmp_path)
    assert own.decode(own.encode([{"role": "user", "content": "a"}])) == '<s>"a">'
    with pytest.raises(InputValueError, match="rejects the conversation: no tools"):
        own.encode([{"role": "tool", "content": "a"}])
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Ours(tmp_path / "tokenizer.json").encode([{"role": "user", "content": "b"}]) == [ord("b")]
    with pytest.raises(InputValueError, match="no chat template"):
        Ours(Tokenizer.from_file(str(tmp_path / "tokenizer.json"))).encode([{"role": "user", "content": "b"}])
    with pytest.raises(InputValueError, match="tokenizer is int"):
        Ours(3)
    with pytest.raises(InputTypeError, match=r"prompt is \[1\]: a text, or messages"):
        own.encode([1])  # type: ignore[list-item]


def test_text_of_tokens_that_share_characters_and_spaces() -> None:
    """Bytes of a character arrive apart; a space that begins a text is dropped, but not between prompt and text."""
    words = {
        "<s>": 0,
        "\N{LOWER ONE EIGHTH BLOCK}one": 1,
        "\N{LOWER ONE EIGHTH BLOCK}two": 2,
        "<0xC3>": 3,
        "<0xA9>": 4,
        "a": 5,
    }
    library = Tokenizer(models.BPE(words, [], byte_fallback=True, unk_token="<s>"))
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<s>"])
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    own = Ours(library)
    text = Text(own, [0, 1])
    assert [text.add(t) for t in (2, 3, 4, 0, 1)] == [" two", "", "é", "", " one"]
    assert (text.add(3), text.rest()) == ("", "\N{REPLACEMENT CHARACTER}")
    assert own.encode("a") == [0, 5]
    assert own.encode("a", continues=True) == [5]


def test_processors_see_the_tokens_so_far() -> None:
    """Prompt and text, right-aligned; a processor that forbids repetitions, beside a loop by hand."""
    decoder = shared.decoder(STYLE)

    def new_tokens_only(tokens: jax.Array, logits: jax.Array) -> jax.Array:
        seen = (tokens[:, :, None] == jnp.arange(logits.shape[1], dtype=tokens.dtype)).any(1)
        return jnp.where(seen, -jnp.inf, logits)

    def by_hand(prompt: list[int], count: int) -> list[int]:
        text: list[int] = []
        for _ in range(count):
            row = logits(STYLE, [*prompt, *text], 1)[0].copy()
            row[[*prompt, *text]] = -np.inf
            text.append(int(row.argmax()))
        return text

    found = decoder.generate([P, Q], 6, logits_processors=[new_tokens_only])
    assert found.texts() == [by_hand(P, 6), by_hand(Q, 6)]
    first = decoder.generate([P, Q], 2, length=64)
    more = decoder.generate([[7], [7]], 4, after=first, logits_processors=[new_tokens_only])
    assert [len({*s}) for s in map(np.ndarray.tolist, more.sequences)] == [
        len({*P, *greedy(STYLE, P, 2), 7}) + 4,
        len({*Q, *greedy(STYLE, Q, 2), 7}) + 4,
    ]


def test_repetition_penalty() -> None:
    tokens, row = np.array([[-1, 2, 0, 2]], np.int32), np.float32([[2, 3, -4, -1]])
    assert processed(Choice(max), tokens, row, 2.0).tolist() == [[1, 3, -8, -1]]
    decoder = shared.decoder(STYLE)
    assert decoder.generate([P, Q], 4, repetition_penalty=1.0).texts() == [greedy(STYLE, P, 4), greedy(STYLE, Q, 4)]
    strong = decoder.generate([P, Q], 6, repetition_penalty=1e6)
    before = decoder.compilations
    assert decoder.generate([Q, P], 5, repetition_penalty=1.1).texts() != strong.texts()
    assert decoder.compilations == before


def test_logprobs_are_those_of_the_model() -> None:
    decoder = shared.decoder(STYLE)
    found = decoder.generate([P, Q], 5, logprobs=True, stop=greedy(STYLE, Q, 2)[-1], sampling="top_p", rng=3)
    assert found.logprobs is not None and found.logprobs.shape == found.tokens.shape
    for prompt, text, ours in zip((P, Q), found.texts(), found.logprobs, strict=True):
        for i, token in enumerate(text):
            row = logits(STYLE, [*prompt, *text[:i]], 1)[0].astype(np.float64)
            np.testing.assert_allclose(ours[i], row[token] - np.log(np.exp(row).sum()), rtol=1e-4, atol=1e-5)
        assert (ours[len(text) :] == 0).all()
    with pytest.raises(InputValueError, match="must be tokens as well"):
        onnx2jax.decoder(onnx2jax.demo_decoder()).generate("one ", 2, logprobs=True)


def test_reprs_are_short(counting: Decoder) -> None:
    tokens = [counting.encode(p) for p in PROMPTS]
    found: list[Any] = [counting, counting.generate(tokens, 22), counting.beam_search(tokens, 8, beams=2)]
    for value in found:
        assert len(repr(value).splitlines()) <= 10
        assert "Array" not in repr(value)
    assert "chat template" in repr(counting)
    assert "  0: 22 tokens: 116, 119, " in repr(found[1])


def test_other_libraries_keywords_are_answered_when_loading() -> None:
    with pytest.raises(InputNameError, match="no keyword 'eos_token_id': use stop="):
        onnx2jax.decoder(onnx2jax.demo_decoder(), eos_token_id=3)
    model = onnx2jax.convert(onnx2jax.demo_decoder())
    with pytest.raises(InputTypeError, match=r"pass strict to onnx2jax\.convert"):
        onnx2jax.decoder(model, strict=True)
    assert onnx2jax.decoder(model).tokenizer is None


def test_extents_of_caches_are_inferred_without_a_warning() -> None:
    """In 32-bit mode, where JAX 0.12 warns of int64 tokens."""
    proto = shared.FILES["group query"]().proto
    caches = [v for v in proto.graph.input if v.name.startswith("past")]
    before = [v.type.tensor_type.shape.dim[3].dim_value for v in caches]
    for v in caches:
        v.type.tensor_type.shape.dim[1].dim_param, v.type.tensor_type.shape.dim[3].dim_param = "heads", "size"
    pairs = onnx2jax.decoder(proto).pairs.values()
    assert [p.dims[3] for p in pairs] == before

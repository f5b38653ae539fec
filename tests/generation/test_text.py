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
from onnx2jax.errors import InputNameError, InputTypeError, InputValueError, ModelError
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


def test_texts_are_encoded_and_tokens_decoded(counting: Decoder) -> None:
    tokens = [list(map(ord, p)) for p in PROMPTS]
    assert counting.encode(PROMPTS) == counting.encode(tuple(PROMPTS)) == tokens
    talk = [{"role": "user", "content": "seven"}]
    assert counting.encode([PROMPTS[1], talk]) == [tokens[1], counting.encode(talk)]
    for shape in ((-1,), (1, -1), (-1, 1)):
        assert counting.decode(jnp.reshape(jnp.array(tokens[1]), shape)) == PROMPTS[1]
    assert counting.decode([]) == ""
    with pytest.raises(InputTypeError, match="prompt is 3: a text"):
        counting.encode(3)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([5000], "decode is given tokens from 5000 to 5000; tokens are 0 to 127"),
        ([3, -1], "tokens from -1 to 3"),
        ([1.5], r"tokens is \[1\.5\]: token ids of one text, which are whole numbers"),
        ("one", "tokens is 'one': token ids"),
        ([[1, 2], [3]], r"decode takes one text, and tokens has 2: \[decoder\.decode\(t\) for t in tokens\]"),
        ([[1, 2], [3, 4]], r"decode takes one text, and tokens has 2"),
    ],
)
def test_what_is_not_tokens_of_a_text_is_not_decoded(counting: Decoder, tokens: Any, said: str) -> None:
    with pytest.raises(InputValueError, match=said):
        counting.decode(tokens)


def test_texts_and_tokens_do_not_mix(counting: Decoder) -> None:
    with pytest.raises(InputValueError, match=r"prompt 0 is a text, and prompt 1 is .*: pass texts alone or token ids"):
        counting.generate(["seven ", [3, 4]], 3)  # type: ignore[call-overload]
    assert counting.generate(np.array(PROMPTS), 22) == TEXTS


FOLDER = onnx2jax.demo_decoder().parent


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("tokenizer.json", "{{", r"tokenizer\.json cannot be read by tokenizers \d.*line 1 column.*tokenizer=False"),
        ("tokenizer.json", "{}", r"tokenizer\.json cannot be read by tokenizers"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json contains \[\], not a JSON object"),
        ("tokenizer_config.json", b"\xff", r"tokenizer_config\.json is not a text in UTF-8"),
        (
            "tokenizer_config.json",
            '{"chat_template": 3}',
            r"chat_template of .*tokenizer_config\.json is 3, not a text",
        ),
        (
            "tokenizer_config.json",
            '{"chat_template": "{% if %}"}',
            r"template of .*_config\.json has an error in line 1: ",
        ),
        ("chat_template.jinja", "a\n{{ b", r"chat_template\.jinja has an error in line 2: "),
        ("chat_template.jinja", "{{ 3 | unheard_of }}", r"chat_template\.jinja has an error in line 1: .*unheard_of"),
    ],
)
def test_broken_files_of_a_tokenizer_are_named_when_loading(tmp_path: Path, file: str, text: Any, said: str) -> None:
    shutil.copytree(FOLDER, tmp_path / "broken")
    path = tmp_path / "broken" / file
    path.unlink(missing_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError, match=said) as error:
        onnx2jax.decoder(tmp_path / "broken")
    assert str(path.parent) in str(error.value)
    assert onnx2jax.decoder(tmp_path / "broken", tokenizer=False).tokenizer is None


def test_any_object_with_encode_and_decode_is_a_tokenizer() -> None:
    class Bytes:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, tokens: list[int]) -> str:
            return bytes(tokens).decode()

    own = Ours(Bytes())
    assert own.decode(own.encode("two")) == "two"


def test_a_tokenizer_that_is_no_file_is_named_when_loading(tmp_path: Path) -> None:
    model = onnx2jax.convert(onnx2jax.demo_decoder())
    for name in ("gpt2", "a/b"):
        fix = rf"tokenizer=tokenizers\.Tokenizer\.from_pretrained\('{name}'\)"
        with pytest.raises(FileNotFoundError, match=f"no such folder or file of a tokenizer; .*{fix}"):
            onnx2jax.decoder(model, tokenizer=name)
    with pytest.raises(FileNotFoundError, match=r"of a tokenizer: '.*missing\.json'"):
        onnx2jax.decoder(model, tokenizer=tmp_path / "missing.json")
    with pytest.raises(FileNotFoundError, match="no tokenizer found"):
        onnx2jax.decoder(model, tokenizer=tmp_path)


def test_a_template_that_cannot_render_a_conversation_is_named(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 'user: ' + messages[0].content }}")
    with pytest.raises(InputValueError, match=r"of .*chat_template\.jinja cannot render the conversation: .* str"):
        Ours(tmp_path).encode([{"role": "user", "content": [{"type": "text", "text": "a"}]}])


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

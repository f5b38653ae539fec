"""onnxruntime-extensions' operators: what its documentation says, and its library where it is installed."""

from __future__ import annotations

import io
import json
import random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnx2jax
from onnx2jax.errors import OnnxError, UnsupportedOperatorError
from onnx2jax.ops import extensions
from tests.support.helpers import run_op

CONTRIB, TOOL = extensions.DOMAINS
VOCABULARY = (
    "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld\n##s\n##ed\nun\n##want\n,\n!\ncafe\n中\nfoo\n##bar\n"
    "Hello\n-\nworl\na\nb\n##a\nab\n##中\n.\ne\n##e\n##é\né\nA"
)


def text(*words: Any) -> np.ndarray:
    return np.array(words, object)


def contrib(name: str, *inputs: Any, outputs: int = 1, domain: str = CONTRIB, **attributes: Any) -> Any:
    return run_op(name, *inputs, domain=domain, n_outputs=outputs, **attributes)


# ------------------------------------------------------------------------------- as the documentation says


def test_examples_of_the_documentation() -> None:
    joined = [contrib("StringJoin", text(["a", "b", "c"], ["aa", "bb", ""]), text(";"), np.int64([k])) for k in (1, 0)]
    assert [v.tolist() for v in joined] == [["a;b;c", "aa;bb;"], ["a;aa", "b;bb", "c;"]]
    pytest.importorskip("re2")
    functions = text(["def myfunc():"], ["def dummy():"])
    pattern, rewrite = r"def\s+([a-zA-Z_][a-zA-Z_0-9]*)\s*\(\s*\):", r"static PyObject* py_\1(void) {"
    replaced = contrib("StringRegexReplace", functions, text(pattern), text(rewrite))
    assert replaced.tolist() == [["static PyObject* py_myfunc(void) {"], ["static PyObject* py_dummy(void) {"]]
    words, first, last, rows = contrib(
        "StringRegexSplitWithOffsets", text("hello there"), text(r"(\s)"), text(r"\s"), outputs=4
    )
    assert words.tolist() == ["hello", " ", "there"]
    assert (first.tolist(), last.tolist(), rows.tolist()) == ([0, 5, 6], [5, 6, 11], [0, 3])


def test_wordpiece_of_the_documentation() -> None:
    vocabulary = '{"want": 10, "##want": 11, "##ed": 12, "wa": 13, "un": 14, "runn": 15, "##ing": 16}'
    attributes = {"vocab": vocabulary, "suffix_indicator": "##", "unknown_token": "[UNK]"}
    words, rows = text("unwanted", "running", "unwantedX", "running"), np.int64([0, 2, 4])
    pieces, ends, *_ = contrib("WordpieceTokenizer", words, rows, outputs=4, **attributes)
    assert pieces.tolist() == [
        *("un", "##want", "##ed", "runn", "##ing"),
        *("un", "##want", "##ed", "[UNK]", "runn", "##ing"),
    ]
    assert ends.tolist() == [0, 5, 11]


def test_vectors_of_the_documentation() -> None:
    table = {"map": "a\t0 0 1 2\nb\t0 1 2 3\nd\t0 1 3 4"}
    vectors = [[0, 0, 1, 2], [0, 1, 3, 4], [0, 0, 0, 0]]
    assert contrib("StringToVector", text("a", "d", "e"), unk="0 0 0 0", **table).tolist() == vectors
    assert contrib("VectorToString", np.int64(vectors), unk="none", **table).tolist() == ["a", "d", "none"]


@pytest.mark.parametrize("domain", extensions.DOMAINS)
def test_bert_of_one_text_and_of_two(domain: str) -> None:
    ids, types, mask = contrib(
        "BertTokenizer", text("Hello worlds, unwanted!"), outputs=3, domain=domain, vocab_file=VOCABULARY
    )
    assert ids.tolist() == [2, 5, 6, 7, 11, 9, 10, 8, 12, 3]
    assert not types.any() and mask.all()
    ids, types, _ = contrib("BertTokenizer", text("hello", "foobar"), outputs=3, vocab_file=VOCABULARY)
    assert (ids.tolist(), types.tolist()) == ([2, 5, 3, 15, 16, 3], [0, 0, 0, 1, 1, 1])
    cased = contrib("BertTokenizer", text("Hello"), vocab_file=VOCABULARY, do_lower_case=0, outputs=3)[0]
    accents = contrib("BertTokenizer", text("Café"), vocab_file=VOCABULARY, strip_accents=1, outputs=3)[0]
    assert (cased.tolist(), accents.tolist()) == ([2, 17, 3], [2, 13, 3])


def test_gpt2_splits_and_pads_as_tokenizers_does() -> None:
    pytest.importorskip("tokenizers")
    vocabulary = '{"a": 0, "b": 1, "c": 2, "Ġ": 3, "ab": 4, "Ġab": 5, "s": 6, "\'": 7, "\'s": 8, "Ã": 9, "©": 10}'
    attributes = {"vocab": vocabulary, "merges": "#version: 0.2\na b\nĠ ab\n' s"}
    ids, mask = contrib("GPT2Tokenizer", text("ab ab's", "é"), outputs=2, **attributes)
    assert (ids.tolist(), mask.tolist()) == ([[4, 5, 8], [9, 10, 0]], [[1, 1, 1], [1, 1, 0]])
    assert contrib("GPT2Tokenizer", text("ab ab's"), outputs=2, padding_length=2, **attributes)[0].tolist() == [[4, 5]]


def test_images_come_back() -> None:
    images = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    file = contrib("EncodeImage", pixels, domain=TOOL, format="png")
    np.testing.assert_array_equal(contrib("DecodeImage", file, domain=TOOL), pixels)
    flat = np.full((16, 16, 3), (10, 200, 90), np.uint8)
    decoded = contrib("DecodeImage", contrib("EncodeImage", flat, domain=TOOL, format="jpg"), domain=TOOL)
    assert np.abs(decoded.astype(int) - flat).max() <= 2
    bitmap = io.BytesIO()
    images.fromarray(pixels).save(bitmap, "BMP")
    with pytest.raises(OnnxError, match="no PNG or JPEG"):
        contrib("DecodeImage", np.frombuffer(bitmap.getvalue(), np.uint8))


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "message"),
    [
        ("StringConcat", (text("a", "b"), text("c")), {}, "shapes must be equal"),
        ("StringJoin", (text("a"), text(","), np.int64([-1])), {}, "axis"),
        ("StringLower", (text("\u1f08"),), {}, "no small letter"),
        ("StringRegexReplace", (text("a"), text("a"), text(r"\1")), {}, "rewrite"),
        ("StringRegexSplitWithOffsets", (text("a b"), text(" "), text("")), {}, "must have a group"),
        ("StringSplit", (text("é"), text(""), np.array([True])), {}, "ASCII"),
        ("SegmentSum", (np.ones(2, np.float32), np.int64([0, 2])), {}, "increase by 0 or 1"),
        ("BertTokenizer", (text("a", "b", "c"),), {"vocab_file": VOCABULARY}, "one text or two"),
        ("BertTokenizer", (text("a"),), {"vocab_file": "a\nb"}, "lacks '\\[CLS\\]'"),
        ("BertTokenizer", (text("a a", "a"),), {"vocab_file": VOCABULARY, "max_length": 5}, "shorten them"),
        ("BertTokenizerDecoder", (np.int64([99]), np.int64([])), {"vocab_file": VOCABULARY}, "outside the vocabulary"),
    ],
)
def test_what_has_no_exact_answer_is_refused(name: str, inputs: Any, attributes: Any, message: str) -> None:
    with pytest.raises(OnnxError, match=message):
        contrib(name, *inputs, **attributes)


def one_node(name: str, inputs: list[np.ndarray], outputs: int, domain: str, **attributes: Any) -> onnx.ModelProto:
    """A model of one node; the types of outputs are left open."""
    given, made = [f"i{k}" for k in range(len(inputs))], [f"o{k}" for k in range(outputs)]
    types = [TensorProto.STRING if v.dtype == object else helper.np_dtype_to_tensor_dtype(v.dtype) for v in inputs]
    node = helper.make_node(name, given, made, domain=domain, **attributes)
    values = [
        helper.make_tensor_value_info(n, t, [None] * v.ndim) for n, t, v in zip(given, types, inputs, strict=True)
    ]
    graph = helper.make_graph([node], "g", values, [onnx.ValueInfoProto(name=n) for n in made])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)], ir_version=8
    )


def test_refused_operators_say_what_to_do_instead() -> None:
    for name, why in extensions.REPLACEMENTS.items():
        assert all((d, name) not in {(d, n) for n in onnx2jax.supported()[d]} for d in extensions.DOMAINS)
        with pytest.raises(UnsupportedOperatorError, match=f"(?s)ai.onnx.contrib 1: {name} .*{why[:20]}"):
            onnx2jax.convert(one_node(name, [text("a")], 1, CONTRIB))


def test_a_model_of_strings_and_numbers_runs() -> None:
    """A tokenizer in front of an embedding, as exporters merge them."""
    tokenizer = helper.make_node(
        "BertTokenizer", ["text"], ["ids", "types", "mask"], domain=CONTRIB, vocab_file=VOCABULARY
    )
    table = np.random.default_rng(0).normal(size=(31, 4)).astype(np.float32)
    graph = helper.make_graph(
        [tokenizer, helper.make_node("Gather", ["table", "ids"], ["y"])],
        "g",
        [helper.make_tensor_value_info("text", TensorProto.STRING, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 4])],
        [onnx.numpy_helper.from_array(table, "table")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    y = onnx2jax.convert(helper.make_model(graph, opset_imports=opsets, ir_version=8))(text("hello ab"))
    np.testing.assert_array_equal(y, table[[2, 5, 23, 3]])


# ------------------------------------------------------------------------------- beside the library


def beside(name: str, *inputs: Any, outputs: int = 1, domain: str = CONTRIB, **attributes: Any) -> None:
    """Compares with onnxruntime and the extensions' library, types and shapes too."""
    library = pytest.importorskip("onnxruntime_extensions", reason="pip install onnxruntime-extensions")
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(library.get_library_path())
    model = one_node(name, list(inputs), outputs, domain, **attributes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    theirs = session.run(None, {f"i{k}": v for k, v in enumerate(inputs)})
    ours = contrib(name, *inputs, outputs=outputs, domain=domain, **attributes)
    for a, b in zip(theirs, ours if outputs > 1 else (ours,), strict=True):
        assert (a.dtype, a.shape, a.tolist()) == (b.dtype, b.shape, b.tolist()), (name, inputs, attributes)


def test_bert_beside_the_library() -> None:
    draw = random.Random(0)
    parts = [*"aabbeAB é É中国,.!-\u0001\u200b\u0301\u00a0\t…$Ж", "hello", "un", "want", "foobar", "cafe", " "]
    choices = ({}, {"do_lower_case": 0}, {"strip_accents": 1}, {"tokenize_chinese_chars": 0}, {"unk_token": "foo"})
    for k in range(60):
        texts = text(*("".join(draw.choices(parts, k=draw.randint(0, 9))) for _ in range(1 + k % 2)))
        beside("BertTokenizer", texts, outputs=4, vocab_file=VOCABULARY, **draw.choice(choices))
        if k % 2:
            beside("HfBertTokenizer", texts, outputs=3, vocab_file=VOCABULARY)
    beside("BertTokenizer", text("hello a b"), outputs=4, vocab_file=VOCABULARY, max_length=4)


def test_decoders_beside_the_library() -> None:
    draw = random.Random(0)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "'s", "n't", "##c", "##-", "a-", "..."]
    tokens += [*"ab1中é…—“。!\"#$'()*,-./:;<[_"]
    flags = "use_indices", "skip_special_tokens", "clean_up_tokenization_spaces"
    for _ in range(60):
        ids = np.int64([draw.randrange(len(tokens)) for _ in range(draw.randint(1, 6))])
        position = np.int64([sorted(draw.randint(0, len(ids)) for _ in range(2))])
        attributes = {name: draw.randint(0, 1) for name in flags}
        beside("BertTokenizerDecoder", ids, position, vocab_file="\n".join(tokens), **attributes)


def test_strings_beside_the_library() -> None:
    for name in ("StringUpper", "StringLower", "StringStrip", "StringLength"):
        beside(name, text(*map(chr, [*range(1, 0x700), 0x1F600]), " a\u00a0", ""))
    for marks in (",", ",;", ""):
        for skip in (True, False):
            beside("StringSplit", text("a,,b", "c d", ",", ";a;", ""), text(marks), np.array([skip]), outputs=3)
    draw = random.Random(0)
    patterns, rewrites = ["x*", "a", "(a)(b)?", "[ab]+", "^a", "a$", "a|", "b*"], ["-", r"<\0>", r"\\", "z"]
    for k in range(60):
        texts = text(*("".join(draw.choices("aabxé 1", k=draw.randint(0, 6))) for _ in range(2)))
        given = text(draw.choice(patterns)), text(draw.choice(rewrites))
        beside("StringRegexReplace", texts, *given, global_replace=k % 2)
        delimiter, keep = (
            draw.choice([r"(\s)", "(a)", "a(b)", "(a)b", r"(\d)(\w)?"]),
            draw.choice(["", r"\s", "a", "1"]),
        )
        beside("StringRegexSplitWithOffsets", texts, text(delimiter), text(keep), outputs=4)


def test_gpt2_beside_the_library() -> None:
    alphabet = {
        c: i
        for i, c in enumerate(
            [*map(chr, [*range(33, 127), *range(161, 173), *range(174, 324)]), "he", "ll", "llo", "Ġt"]
        )
    }
    vocabulary = json.dumps(alphabet)
    for sample in ("hello the 2024", "don't 'LL", " é中😀\n\n x ", "", "a\u00a0b½_!!"):
        beside("GPT2Tokenizer", text(sample, "the"), outputs=2, vocab=vocabulary, merges="h e\nl l\nll o\nĠ t")


def test_images_beside_the_library() -> None:
    images = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (9, 11, 3), np.uint8)
    for mode in ("RGB", "L", "P", "RGBA", "1", "LA"):
        file = io.BytesIO()
        images.fromarray(pixels).convert(mode).save(file, "PNG")
        beside("DecodeImage", np.frombuffer(file.getvalue(), np.uint8), domain=TOOL)

"""Strings, and n-grams of strings and integers."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.ops.test_microsoft import onnxruntime_says
from tests.support.helpers import run_op


def text(*values):
    return np.array(values, object)


# --------------------------------------------------------------------------------------------- strings


def test_concat_broadcasts_and_keeps_rank_zero():
    assert run_op("StringConcat", text("a", "b"), np.array("!", object)).tolist() == ["a!", "b!"]
    scalar = run_op("StringConcat", np.array("a", object), np.array("é", object))
    assert (scalar.shape, scalar.dtype, scalar.item()) == ((), object, "aé")


def test_split():
    words, counts = run_op("StringSplit", text("a,b,,c", "", "x"), delimiter=",", n_outputs=2)
    assert words.tolist() == [["a", "b", "", "c"], ["", "", "", ""], ["x", "", "", ""]]
    assert counts.tolist() == [4, 1, 1] and counts.dtype == np.int64
    words, counts = run_op("StringSplit", text(" a  b c ", ""), maxsplit=1, n_outputs=2)
    assert words.tolist() == [["a", "b c"], ["", ""]]
    assert counts.tolist() == [2, 0]
    words, counts = run_op("StringSplit", np.empty((0, 2), object), n_outputs=2)
    assert (words.shape, counts.shape) == ((0, 2, 0), (0, 2))


def test_normalizer():
    x = text("Mon", "mon", "Tue")
    assert run_op("StringNormalizer", x, stopwords=("MON",)).tolist() == ["Tue"]
    assert run_op("StringNormalizer", x, stopwords=("Mon",), is_case_sensitive=1).tolist() == ["mon", "Tue"]
    upper = run_op("StringNormalizer", x[None], stopwords=("mon", "tue"), case_change_action="UPPER")
    assert upper.tolist() == [[""]]
    assert run_op("StringNormalizer", text("Äß"), case_change_action="LOWER", locale="en_US").tolist() == ["äß"]
    with pytest.raises(NotImplementedError, match="locale"):
        run_op("StringNormalizer", x, case_change_action="LOWER", locale="tr_TR")
    with pytest.raises(ValueError, match="shape"):
        run_op("StringNormalizer", np.stack([x, x]))


def test_regex():
    pytest.importorskip("re2")
    x = text("ab", "abc", "é", "")
    assert run_op("RegexFullMatch", x, pattern="[a-c]+|.").tolist() == [True, True, True, False]
    assert run_op("RegexFullMatch", x.reshape(2, 2), pattern=r"\w*").tolist() == [[True, True], [False, True]]
    with pytest.raises(ValueError, match="RE2"):
        run_op("RegexFullMatch", x, pattern=r"(?=a)")


def test_tokenizer():
    def tokens(*x, **attributes):
        options = {"mark": 0, "mincharnum": 1, "pad_value": "#"} | attributes
        return run_op("Tokenizer", text(*x), domain="com.microsoft", **options).tolist()

    assert tokens("abc", "é", separators=("",)) == [["a", "b", "c"], ["é", "#", "#"]]
    assert tokens("ab", "", separators=("",), mark=1) == [["\x02", "a", "b", "\x03"], ["\x02", "\x03", "#", "#"]]
    assert tokens("", separators=("",), mark=1) == [[]]
    with pytest.raises(ValueError, match="exactly one"):
        tokens("a")
    pytest.importorskip("re2")
    assert tokens("a bb.c", "d", separators=(" ", "[.]")) == [["a", "bb", "c"], ["d", "#", "#"]]
    assert tokens("a bb.c", tokenexp="[a-z]+", mincharnum=2) == [["bb"]]


def test_murmur_hash():
    def hashes(x, **attributes):
        return run_op("MurmurHash3", x, domain="com.microsoft", **attributes)

    known = text("", "hello", "hello, world", "The quick brown fox jumps over the lazy dog")
    assert [*map(hex, hashes(known))] == ["0x0", "0x248bfa47", "0x149bbb7f", "0x2e4ff723"]
    numbers = (np.array([[3, 2**31 - 1]], dtype) for dtype in (np.uint32, np.int64, np.float64))
    for x in (known, text("é", "日本"), *numbers):
        for attributes in ({"seed": 7}, {"positive": 0}):
            theirs = onnxruntime_says("MurmurHash3", [x], 1, attributes)[0]
            assert np.array_equal(hashes(x, **attributes), theirs) and hashes(x, **attributes).dtype == theirs.dtype


# --------------------------------------------------------------------------------------------- n-grams

POOL = {"ngram_counts": (0, 4), "ngram_indexes": (0, 1, 2, 3, 4, 5, 6), "pool_int64s": (2, 3, 5, 4, 5, 6, 7, 8, 6, 7)}
X = np.array([[1, 1, 3, 3, 3, 7], [8, 6, 7, 5, 6, 8]], np.int64)


def counts(x, low, high, skip, *, mode="TF", **more):
    return run_op(
        "TfIdfVectorizer",
        x,
        min_gram_length=low,
        max_gram_length=high,
        max_skip_count=skip,
        mode=mode,
        **(POOL | more),
    )


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("low", "high", "skip", "want"),
    [
        (1, 1, 0, [[0, 3, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0]]),
        (2, 2, 0, [[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 1]]),
        (2, 2, 5, [[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1]]),
        (1, 2, 0, [[0, 3, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0, 1]]),
    ],
)
def test_tfidf_of_integers(low, high, skip, want, dtype):
    """The pool holds 2, 3, 5, 4 and (5 6), (7 8), (6 7)."""
    x = X.astype(dtype)
    known, traced = counts(x, low, high, skip), jax.jit(lambda x: counts(x, low, high, skip))(x)
    assert known.tolist() == traced.tolist() == want
    assert isinstance(known, np.ndarray) and known.dtype == traced.dtype == np.float32
    assert counts(x[1], low, high, skip).tolist() == want[1]


@pytest.mark.parametrize(
    ("mode", "want"),
    [("IDF", [0, 20, 0, 0, 0, 0, 0]), ("TFIDF", [0, 60, 0, 0, 0, 0, 0]), ("TF", [0, 3, 0, 0, 0, 0, 0])],
)
def test_tfidf_weights(mode, want):
    assert counts(X[0], 1, 2, 0, mode=mode, weights=(10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0)).tolist() == want


def test_tfidf_weights_belong_to_the_pool():
    """The third n-gram has the third weight, wherever its count is written."""
    more = {"ngram_indexes": (6, 5, 4, 3, 2, 1, 0), "weights": (1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0)}
    assert counts(np.array([5]), 1, 1, 0, mode="TFIDF", **more).tolist() == [0, 0, 0, 0, 9, 0, 0]


def test_tfidf_of_grams_that_share_a_column():
    more = {"ngram_counts": (0,), "ngram_indexes": (0, 1, 1), "pool_int64s": (2, 3, 5), "weights": (1.0, 2.0, 3.0)}
    for mode, want in (("TF", 3), ("TFIDF", 8), ("IDF", 5)):
        assert counts(np.array([5, 5, 3]), 1, 1, 0, mode=mode, **more).tolist() == [0, want]
    with pytest.raises(ValueError, match="twice"):
        counts(X, 1, 1, 0, **(more | {"pool_int64s": (5, 3, 5)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ngram_counts": (-1, 4)}, "ngram_counts"),
        ({"ngram_counts": (0, 11)}, "ngram_counts"),
        ({"ngram_indexes": (0, 1, 2, 3, 4, 5, -1)}, "ngram_indexes"),
        ({"ngram_indexes": (0, 1, 2)}, "7 n-grams"),
        ({"weights": (2.0,)}, "weights must have 7 entries"),
    ],
)
def test_tfidf_of_other_counts(change, message):
    with pytest.raises(ValueError, match=message):
        counts(X, 1, 2, 0, **change)


def test_tfidf_of_strings():
    pool = {"pool_int64s": None, "pool_strings": tuple(map(str, POOL["pool_int64s"]))}
    pool = {k: v for k, v in (POOL | pool).items() if v is not None}
    x = np.array([list(map(str, row)) for row in X.tolist()], object)
    got = run_op("TfIdfVectorizer", x, min_gram_length=1, max_gram_length=2, max_skip_count=2**62, mode="TF", **pool)
    assert got.tolist() == counts(X, 1, 2, 5).tolist()


def test_tfidf_shorter_than_a_gram():
    assert counts(X[:, :1], 2, 2, 3).tolist() == [[0] * 7] * 2
    assert counts(X[:, :0], 1, 2, 0).shape == (2, 7)

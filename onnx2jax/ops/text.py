"""Strings: string tensors are NumPy object arrays on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
import numpy as np

from .. import compat
from .arrays import is_known, xp
from .ml.scores import batch, only
from .registry import Static, op


def regex(pattern):
    """A compiled regular expression in RE2's syntax, which ONNX specifies and which differs from Python's `re`."""
    re2 = compat.optional("re2", "re2")
    try:
        return re2.compile(pattern)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else error
        raise ValueError(f"{pattern!r} is not a regular expression in RE2's syntax ({reason})") from None


def _padded(rows, shape, filler):
    """Ragged lists of strings as one tensor, padded with ``filler`` to the longest."""
    width = max(map(len, rows), default=0)
    flat = [word for row in rows for word in (*row, *[filler] * (width - len(row)))]
    return np.array(flat, object).reshape(*shape, width)


@op("RegexFullMatch", since=20, extra="re2", limits="needs the extra `re2` (google-re2)")
def regex_full_match(X: Static, *, pattern):
    expression = regex(pattern)
    return np.array([expression.fullmatch(x) is not None for x in X.flat], bool).reshape(X.shape)


@op("StringConcat", since=20)
def string_concat(X: Static, Y: Static):
    return np.asarray(X + Y, dtype=object)


@op("StringSplit", since=20)
def string_split(X: Static, *, delimiter="", maxsplit=None):
    """StringSplit: (padded substrings, counts); an empty delimiter splits at runs of whitespace."""
    limit = -1 if maxsplit is None else maxsplit
    rows = [x.split(delimiter, limit) if delimiter else x.strip().split(None, limit) for x in X.flat]
    return _padded(rows, X.shape, ""), np.array([len(r) for r in rows], np.int64).reshape(X.shape)


Case = Literal["NONE", "LOWER", "UPPER"]


_LOCALES = "Unicode's default case mapping only: case changes in the locales tr, az and lt are unsupported"


@op("StringNormalizer", since=10, limits=_LOCALES)
def string_normalizer(X: Static, *, case_change_action: Case = "NONE", is_case_sensitive=0, locale=None, stopwords=()):
    """StringNormalizer: removes stop words, then changes case; an empty result becomes one empty string."""
    # Languages whose case mapping differs from Unicode's default.
    if locale is not None and locale[:2].lower() in ("tr", "az", "lt") and case_change_action != "NONE":
        raise NotImplementedError(f"only Unicode's default case mapping is supported (locale is {locale!r})")
    if X.ndim not in (1, 2) or (X.ndim == 2 and X.shape[0] != 1):
        raise ValueError(f"the input must have shape [C] or [1, C] (it has {X.shape})")
    fold = str if is_case_sensitive else str.lower
    changes: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}
    stop = set(map(fold, stopwords))
    kept = [changes[case_change_action](x) for x in X.flat if fold(x) not in stop] or [""]
    return np.array(kept, object).reshape(*X.shape[:-1], len(kept))


def _extra(attributes):
    """Characters are found without regular expressions."""
    return "" if attributes.get("separators") == ("",) else "re2"


@op("Tokenizer", domain="com.microsoft", extra=_extra, limits="needs the extra `re2` (google-re2), but for characters")
def tokenizer(X: Static, *, mark, mincharnum, pad_value, separators=None, tokenexp=None):
    """com.microsoft Tokenizer: splits into characters (separators is [""]), at separators, or by a token pattern."""
    only(separators=separators, tokenexp=tokenexp)
    batch(X)  # raises for other ranks
    if tokenexp:
        expression = regex(tokenexp)
        rows = [[m.group() for m in expression.finditer(x)] for x in X.flat]
    elif tuple(separators) == ("",):
        rows = list(map(list, X.flat))
    else:
        rows = [[x] for x in X.flat]
        for expression in map(regex, separators):
            rows = [[part for word in row for part in expression.split(word)] for row in rows]
    rows = [[word for word in row if word and len(word) >= mincharnum] for row in rows]
    if mark and any(rows):
        rows = [["\x02", *row, "\x03"] for row in rows]
    return _padded(rows, X.shape, pad_value)


@op("MurmurHash3", domain="com.microsoft")
def murmur_hash3(X: Static, *, positive=1, seed=0):
    """com.microsoft MurmurHash3: the 32-bit hash of the bytes of each element; strings are hashed as UTF-8."""
    data = [x.encode() for x in X.flat] if X.dtype == object else [x.tobytes() for x in X.flat]
    hashes = np.array([_murmur(d, seed) for d in data], np.uint32).reshape(X.shape)
    return hashes if positive else hashes.view(np.int32)


def _murmur(data: bytes, seed: int) -> int:
    """MurmurHash3 (x86, 32 bits) by Austin Appleby: 4-byte words, then the remaining bytes."""
    h = seed % 2**32
    for start in range(0, len(data), 4):
        word = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 % 2**32
        h ^= (word << 15 | word >> 17) * 0x1B873593 % 2**32
        if start + 4 <= len(data):
            h = ((h << 13 | h >> 19) * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ h >> shift) * factor % 2**32
    return h


# ---------------------------------------------------------------------------------------------- n-grams


@op("TfIdfVectorizer", since=9, unsharded=True, limits="strings on the host; an n-gram listed twice raises")
def tf_idf_vectorizer(
    X, *, max_gram_length, max_skip_count, min_gram_length, mode: Literal["TF", "IDF", "TFIDF"], ngram_counts,
    ngram_indexes, pool_int64s=None, pool_strings=None, weights=None,
):  # fmt: skip
    """TfIdfVectorizer: n-gram counts, looked up in a trie of sorted tables without a loop over the vocabulary."""
    name, pool = only(pool_int64s=pool_int64s, pool_strings=pool_strings)
    dtype = object if name == "pool_strings" else np.int64
    if (dtype is object) != (X.dtype == object):
        raise ValueError(f"the attribute {name} does not match an input of {X.dtype}")
    n_grams, ends = len(ngram_indexes), (*ngram_counts[1:], len(pool))
    if not all(0 <= start <= end for start, end in zip(ngram_counts, ends, strict=True)):
        raise ValueError(f"ngram_counts {tuple(ngram_counts)} must ascend from 0 to the {len(pool)} items of the pool")
    total = sum((end - start) // n for n, (start, end) in enumerate(zip(ngram_counts, ends, strict=True), 1))
    if total != n_grams or min(ngram_indexes, default=0) < 0:
        raise ValueError(
            f"ngram_indexes {tuple(ngram_indexes)} must be a column for each of the pool's {total} n-grams"
        )
    if len(weights or ngram_indexes) != n_grams:
        raise ValueError(f"weights must have {n_grams} entries, as ngram_indexes (it has {len(weights)})")
    words, pool = np.unique(np.array(pool, dtype), return_inverse=True)
    tokens = find(words, batch(X).astype(dtype)).astype(np.int64)
    # An extra last column counts n-grams that are not in the pool.
    counts = xp(X).zeros((tokens.shape[0], n_grams + 1), np.float32)
    first = 0
    for n, (start, stop) in enumerate(zip(ngram_counts, ends, strict=True), 1):
        grams = pool[start:stop].reshape(-1, n)
        if min_gram_length <= n <= max_gram_length and len(grams):
            most = (tokens.shape[1] - 1) // (n - 1) if n > 1 else 1  # strides that fit into a row
            for skip in range(min(max_skip_count + 1, most)):
                counts = _count(counts, tokens, grams, first, skip + 1, len(words))
        first += len(grams)
    counts = xp.minimum(counts[:, :-1], np.float32(1)) if mode == "IDF" else counts[:, :-1]
    counts = counts if mode == "TF" or weights is None else counts * np.array(weights, np.float32)
    columns = np.zeros((tokens.shape[0], max(ngram_indexes) + 1), np.float32)
    return _add(columns, (slice(None), np.array(ngram_indexes)), counts).reshape(*X.shape[:-1], columns.shape[1])


def find(table, values, method="scan"):
    """The indices of values in a sorted table, -1 for values it does not contain."""
    # The method "scan" is a loop, which XLA does not recompute in each consumer.
    options = {} if is_known(values) else {"method": method}
    index = xp.minimum(xp.searchsorted(table, values, **options), len(table) - 1)
    return xp.where(xp(index).asarray(table)[index] == values, index, -1)


def _add(array, index, values):
    """The array with values added at an index; duplicate indices accumulate. Updates a NumPy array in place."""
    if is_known(values):
        np.add.at(array, index, values)
        return array
    return jnp.asarray(array).at[index].add(values)


def _count(counts, tokens, grams, first, stride, n_words):
    """``counts`` plus the n-grams of each row, of tokens `stride` apart, in the columns from `first` on."""
    n, rows = grams.shape[1], np.arange(tokens.shape[0])[:, None]
    windows = tokens.shape[1] - (n - 1) * stride
    if windows <= 0:
        return counts
    state, prefix = np.zeros((len(rows), windows), np.int64), np.zeros(len(grams), np.int64)
    for k in range(n):
        token = tokens[:, k * stride : k * stride + windows]
        table, prefix = np.unique(prefix * n_words + grams[:, k], return_inverse=True)
        missing = (state < 0) | (token < 0)
        state = find(table, xp.where(missing, -1, state * n_words + token)).astype(np.int64)
    if len(table) < len(grams):
        raise ValueError(f"the pool contains {len(grams) - len(table)} of its {n}-grams twice")
    column = np.empty(len(table), np.int64)
    column[prefix] = first + np.arange(len(grams))
    # State -1 (not in the pool) selects the last column.
    hits = xp(state).asarray(np.append(column, counts.shape[1] - 1))[state]
    return _add(counts, (rows, hits), xp.ones_like(hits, np.float32))

"""Text: string tensors are object arrays, which live on the host."""

from __future__ import annotations

import numpy as np

from .arrays import xp
from .registry import Static, op


def _regex(pattern):
    """A compiled regular expression in RE2's syntax, which ONNX prescribes and Python's `re` only resembles."""
    try:
        import re2
    except ImportError:
        raise ImportError("regular expressions need google-re2; install it with: pip install 'onnx2jax[re2]'") from None
    try:
        return re2.compile(pattern)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else error
        raise ValueError(f"{pattern!r} is not a regular expression in RE2's syntax ({reason})") from None


def _each(function, X, dtype):
    """The function of every element, in an array of the same shape."""
    return np.array([function(x) for x in X.flat], dtype).reshape(X.shape)


def _padded(rows, shape, filler):
    """Ragged lists of strings as one tensor, filled up to the longest."""
    width = max(map(len, rows), default=0)
    flat = [word for row in rows for word in (*row, *[filler] * (width - len(row)))]
    return np.array(flat, object).reshape(*shape, width)


@op("RegexFullMatch", since=20)
def regex_full_match(X: Static, *, pattern=None):
    if pattern is None:
        raise ValueError("RegexFullMatch needs the attribute 'pattern'")
    expression = _regex(pattern)
    return _each(lambda x: expression.fullmatch(x) is not None, X, bool)


@op("StringConcat", since=20)
def string_concat(X: Static, Y: Static):
    return np.asarray(X + Y, dtype=object)


@op("StringSplit", since=20)
def string_split(X: Static, *, delimiter="", maxsplit=None):
    """StringSplit: an empty delimiter splits at runs of white space."""
    rows = [x.split(delimiter or None, -1 if maxsplit is None else maxsplit) for x in X.flat]
    return _padded(rows, X.shape, ""), np.array([len(r) for r in rows], np.int64).reshape(X.shape)


# Languages whose upper and lower case differ from Unicode's default.
_OWN_CASES = ("tr", "az", "lt")


@op("StringNormalizer", since=10)
def string_normalizer(X: Static, *, case_change_action="NONE", is_case_sensitive=0, locale=None, stopwords=()):
    """StringNormalizer: drop the stop words, then change the case. Nothing left becomes one empty string."""
    if locale is not None and locale[:2].lower() in _OWN_CASES and case_change_action != "NONE":
        raise NotImplementedError(f"only Unicode's default case mapping is available (locale is {locale!r})")
    if X.ndim not in (1, 2) or (X.ndim == 2 and X.shape[0] != 1):
        raise ValueError(f"the input must have shape [C] or [1, C] (it has {X.shape})")
    change = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}.get(case_change_action)
    if change is None:
        raise ValueError(f"case_change_action must be NONE, LOWER or UPPER (got {case_change_action!r})")
    fold = str if is_case_sensitive else str.lower
    stop = {fold(w) for w in stopwords}
    kept = [change(x) for x in X.flat if fold(x) not in stop] or [""]
    return np.array(kept, object).reshape(*X.shape[:-1], len(kept))


@op("Tokenizer", domain="com.microsoft")
def tokenizer(X: Static, *, mark, mincharnum, pad_value, separators=None, tokenexp=None):
    """com.microsoft Tokenizer: by characters (separators is [""]), by separators, or by the shape of a token."""
    if (separators is None) == (tokenexp is None):
        raise ValueError("exactly one of the attributes 'separators' and 'tokenexp' must be given")
    if X.ndim not in (1, 2):
        raise ValueError(f"the input must have shape [C] or [N, C] (it has {X.shape})")
    if tokenexp is not None:
        expression = _regex(tokenexp)
        rows = [[m.group() for m in expression.finditer(x)] for x in X.flat]
    elif tuple(separators) == ("",):
        rows = [list(x) for x in X.flat]
    else:
        rows = [[x] for x in X.flat]
        for expression in map(_regex, separators):
            rows = [[part for word in row for part in expression.split(word)] for row in rows]
    rows = [[word for word in row if word and len(word) >= mincharnum] for row in rows]
    tokens = _padded(rows, X.shape, pad_value)
    if not mark or not tokens.shape[-1]:
        return tokens
    border = np.full((*X.shape, 1), "\x02", object)
    return np.concatenate([border, tokens, np.full_like(border, "\x03")], axis=-1)


# ---------------------------------------------------------------------------------------------- n-grams


@op("TfIdfVectorizer", since=9)
def tf_idf_vectorizer(
    X,
    *,
    max_gram_length,
    max_skip_count,
    min_gram_length,
    mode,
    ngram_counts,
    ngram_indexes,
    pool_int64s=None,
    pool_strings=None,
    weights=None,
):
    """TfIdfVectorizer: counts of n-grams, found by walking a trie of sorted tables; no loop over the vocabulary."""
    if mode not in ("TF", "IDF", "TFIDF"):
        raise ValueError(f"mode must be TF, IDF or TFIDF (got {mode!r})")
    if (pool_int64s is None) == (pool_strings is None):
        raise ValueError("exactly one of the attributes 'pool_int64s' and 'pool_strings' must be given")
    if X.ndim not in (1, 2):
        raise ValueError(f"the input must have shape [C] or [N, C] (it has {X.shape})")
    text = pool_strings is not None
    if text != (X.dtype == object):
        raise ValueError(f"the pool holds {'strings' if text else 'integers'}, the input {X.dtype}")
    pool = np.array(pool_strings, object) if text else np.array(pool_int64s, np.int64)
    words, pool = np.unique(pool, return_inverse=True)
    np_ = xp(X)
    tokens = _find(np_, words, (X if text else X.astype(np.int64)).reshape(-1, X.shape[-1]))
    width, indexes = max(ngram_indexes) + 1, np.array(ngram_indexes, np.int64)
    found = [np_.zeros((tokens.shape[0], width + 1), np.float32)]
    first = 0
    for n, (start, stop) in enumerate(zip(ngram_counts, (*ngram_counts[1:], len(pool)), strict=True), 1):
        grams = pool[start:stop].reshape(-1, n)
        # An extra last column collects what is not in the pool.
        columns = np.append(indexes[first : first + len(grams)], width)
        first += len(grams)
        if n < min_gram_length or n > max_gram_length or not len(grams):
            continue
        for skip in range(max_skip_count + 1 if n > 1 else 1):
            found.append(_count(np_, tokens, grams, columns, skip + 1, len(words), width + 1))
    counts = sum(found)[:, :width]
    if mode != "TF" and weights is not None:
        scale = np.ones(width, np.float32)
        scale[indexes] = np.array(weights, np.float32)
    else:
        scale = np.ones(width, np.float32)
    counts = np_.minimum(counts, np.float32(1)) if mode == "IDF" else counts
    return (counts * scale).reshape(*X.shape[:-1], width)


def _find(np_, table, values):
    """The places of values in a sorted table, -1 for those that are not there."""
    at = np_.minimum(np_.searchsorted(table, values), len(table) - 1)
    return np_.where(np_.asarray(table)[at] == values if np_ is not np else table[at] == values, at, -1)


def _count(np_, tokens, grams, columns, stride, n_words, width):
    """How often each n-gram occurs in each row, its members `stride` tokens apart."""
    n, rows = grams.shape[1], tokens.shape[0]
    windows = tokens.shape[1] - (n - 1) * stride
    if windows <= 0:
        return np.zeros((rows, width), np.float32)
    state, prefix = np_.zeros((rows, windows), np.int64), np.zeros(len(grams), np.int64)
    for k in range(n):
        token = tokens[:, k * stride : k * stride + windows]
        table, prefix = np.unique(prefix * n_words + grams[:, k], return_inverse=True)
        missing = (state < 0) | (token < 0)
        state = _find(np_, table, np_.where(missing, -1, state * n_words + token))
    column = np.full(len(table) + 1, width - 1)
    column[prefix] = columns[:-1]
    # state -1 reads the last entry: not in the pool
    hits = np_.asarray(column)[state]
    row = np.arange(rows)[:, None]
    if np_ is np:
        counts = np.zeros((rows, width), np.float32)
        np.add.at(counts, (row, hits), np.float32(1))
        return counts
    return np_.zeros((rows, width), np.float32).at[row, hits].add(np.float32(1))

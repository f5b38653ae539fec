"""onnxruntime-extensions: operations on strings, on ragged tensors, and small ones on numbers."""

from __future__ import annotations

import itertools
import re

import jax.numpy as jnp
import numpy as np

from ..arrays import xp
from ..registry import Static
from ..text import regex
from . import contributed

_RE2 = "needs the extra `re2` (google-re2)"
_CASED = ((0x41, 0x5A), (0xC0, 0xD6), (0xD8, 0xDE), (0x399, 0x39D), (0x39F, 0x3A0), (0x410, 0x42F))
"""Ranges of capitals that have a small letter in onnxruntime-extensions; others stay."""
_LOWER = {c: ord(chr(c).lower()) for first, last in _CASED for c in range(first, last + 1)}
_UNSURE = re.compile("[\u1f08-\u1f68]")
_UPPER = {c: c - 32 for c in range(ord("a"), ord("z") + 1)}
CASES = "only capitals of ASCII, Latin-1, Cyrillic and some Greek change, as in onnxruntime-extensions"


def lower(text):
    """Small letters, of the capitals in ``_CASED``."""
    if unsure := _UNSURE.search(text):
        raise ValueError(f"{unsure.group()!r} has no small letter in onnxruntime-extensions; lower it before the model")
    return text.translate(_LOWER)


def strings(values, shape=None):
    """A tensor of strings."""
    return np.array([*values, None], object)[:-1].reshape(-1 if shape is None else shape)


def scalar(name, value):
    """The only element of an input."""
    if value.size != 1:
        raise ValueError(f"{name} must have one element (it has the shape {value.shape})")
    return value.item()


@contributed("StringUpper", "only a to z change, as in onnxruntime-extensions")
def string_upper(input: Static):
    return strings((x.translate(_UPPER) for x in input.flat), input.shape)


@contributed("StringLower", CASES)
def string_lower(input: Static):
    return strings(map(lower, input.flat), input.shape)


@contributed("StringStrip", "removes ASCII's white space from both ends, but of a string that has nothing else")
def string_strip(input: Static):
    return strings((x.strip("\t\n\v\f\r ") or x for x in input.flat), input.shape)


@contributed("StringLength")
def string_length(input: Static):
    return np.array([len(x) for x in input.flat], np.int64).reshape(input.shape)


@contributed("StringConcat", "of one shape: it does not broadcast")
def string_concat(left: Static, right: Static):
    if left.shape != right.shape:
        raise ValueError(f"the shapes must be equal ({left.shape} and {right.shape})")
    return np.asarray(left + right, object)


@contributed("StringEqual", "of one shape, or one with one element")
def string_equal(left: Static, right: Static):
    if left.shape != right.shape and right.size != 1:
        raise ValueError(f"the shapes must be equal, or the second have one element ({left.shape} and {right.shape})")
    return np.asarray(left == (right if left.shape == right.shape else right.item()), bool)


@contributed("StringJoin")
def string_join(input: Static, separator: Static, axis: Static):
    """Joins the strings along an axis; a vector becomes one string."""
    axis, glue = scalar("axis", axis), scalar("separator", separator)
    if not 0 <= axis < max(input.ndim, 1):
        raise ValueError(f"axis ({axis}) must be from 0 to {max(input.ndim, 1) - 1}")
    rows = np.moveaxis(np.atleast_1d(input), axis, -1)
    return strings(map(glue.join, rows.reshape(-1, rows.shape[-1])), rows.shape[:-1] or (1,))


@contributed("StringSplit", "each character of the delimiter separates; the delimiter and split characters are ASCII")
def string_split(input: Static, delimiter: Static, skip_empty: Static):
    """A sparse tensor [strings, most parts]: indices, values and shape. An empty delimiter splits into characters."""
    if input.ndim != 1:
        raise ValueError(f"the input must have one axis (it has the shape {input.shape})")
    marks, skips = scalar("delimiter", delimiter), scalar("skip_empty", skip_empty)
    if not (marks or "".join(input)).isascii():
        raise ValueError(
            "onnxruntime-extensions splits UTF-8 into bytes here: the delimiter, or the text, must be ASCII"
        )
    rows = [(re.split(f"[{re.escape(marks)}]", x) if marks else list(x)) if x else [] for x in input]
    rows = [[part for part in row if part or not skips] for row in rows]
    indices = [(i, j) for i, row in enumerate(rows) for j in range(len(row))]
    shape = np.array([len(rows), max(map(len, rows), default=0)], np.int64)
    return np.array(indices, np.int64).reshape(-1, 2), strings(part for row in rows for part in row), shape


@contributed("StringRegexReplace", _RE2, extra="re2")
def string_regex_replace(input: Static, pattern: Static, rewrite: Static, *, global_replace=1):
    r"""Replaces matches of a pattern of RE2, all or the first; ``\1`` in the rewrite is a group, ``\0`` the match."""
    if not scalar("pattern", pattern):
        raise ValueError("the pattern must not be empty")
    expression, template = regex(pattern.item()), scalar("rewrite", rewrite)
    parts = re.split(r"\\(\d|\\)", template)
    if any("\\" in text for text in parts[::2]) or any(int(g) > expression.groups for g in parts[1::2] if g.isdigit()):
        raise ValueError(rf"the rewrite {template!r} may have \\ and \0 to \{expression.groups} only")

    def filled(match):
        marks = ("\\" if m == "\\" else match.group(int(m)) or "" for m in parts[1::2])
        return "".join(itertools.chain.from_iterable(itertools.zip_longest(parts[::2], marks, fillvalue="")))

    def replaced(text):
        made, at, end = [], 0, -1
        while at <= len(text) and (match := expression.search(text, at)):
            start, stop = match.span()
            if start == stop == end:  # no empty match directly behind a match
                made.append(text[at : at + 1])
                at += 1
                end = -1
                continue
            made += [text[at:start], filled(match)]
            at = end = stop
            if not global_replace:
                break
        return "".join([*made, text[at:]])

    return strings(map(replaced, input.flat), input.shape)


@contributed(
    "StringRegexSplitWithOffsets", f"{_RE2}; the pattern must have a group, which is the delimiter", extra="re2"
)
def string_regex_split(input: Static, delimiter: Static, keep: Static):
    """Words between the first group's matches, their first and last bytes, and the first word of each string.

    Delimiters that match ``keep`` as a whole are words, too.
    """
    expression, kept = regex(scalar("delim_regex_pattern", delimiter)), keep.item() if keep.size else ""
    if not expression.groups:
        raise ValueError(f"the pattern {expression.pattern!r} must have a group: ({expression.pattern})")
    kept = regex(kept) if kept else None
    words, ends, counts = [], [], [0]
    for text in input.flat:
        at = 0
        spans = []
        for match in expression.finditer(text):
            if match.end() == match.start():
                raise ValueError(f"the pattern {expression.pattern!r} matches the empty string")
            start, stop = match.span(1)
            spans += [(at, start)] + ([(start, stop)] if kept and kept.fullmatch(match.group(1)) else [])
            at = match.end()
        spans = [(a, b) for a, b in [*spans, (at, len(text))] if a < b]
        words += [text[a:b] for a, b in spans]
        ends += [(len(text[:a].encode()), len(text[:b].encode())) for a, b in spans]
        counts.append(len(words))
    first, last = np.array(ends, np.int64).reshape(-1, 2).T
    return strings(words), first.copy(), last.copy(), np.array(counts, np.int64)


def _table(map):
    """Strings and vectors of an attribute's rows ``string<tab>numbers``."""
    rows = (line.rpartition("\t")[::2] for line in map.split("\n") if line)
    return [(text, tuple(int(n) for n in numbers.split())) for text, numbers in rows]


def _pairs(map):
    return dict(line.split("\t", 1) for line in map.split("\n") if line)


def _vectors(map):
    return dict(_table(map))


def _strings(map):
    return {vector: text for text, vector in _table(map)}


@contributed("StringMapping", "strings that the table lacks stay")
def string_mapping(input: Static, *, map, once):
    table = once(_pairs, map)
    return strings((table.get(x, x) for x in input.flat), input.shape)


@contributed("StringToVector")
def string_to_vector(input: Static, *, map, once, unk):
    """The vector of each string, ``unk`` for those that the table lacks."""
    table = once(_vectors, map)
    other = [int(n) for n in unk.split()]
    vectors = [table.get(x, other) for x in input.flat]
    return np.array(vectors, np.int64).reshape(*input.shape, len(other))


@contributed("VectorToString")
def vector_to_string(input: Static, *, map, once, unk):
    """The string of each vector along the last axis, or of each number where the table's vectors have one."""
    table = once(_strings, map)
    width = len(next(iter(table), (0,)))
    if width > 1 and input.shape[-1:] != (width,):
        raise ValueError(f"the last axis must have {width} numbers, as the map's vectors (the shape is {input.shape})")
    shape = input.shape[:-1] if width > 1 else input.shape
    return strings((table.get(tuple(v), unk) for v in input.reshape(-1, width).tolist()), shape)


@contributed("MaskedFill")
def masked_fill(value: Static, mask: Static):
    """The values where the mask is true."""
    return value[mask]


@contributed("RaggedTensorToSparse")
def ragged_to_sparse(n_element: Static):
    """Indices and shape of the sparse tensor whose rows have n_element[i + 1] - n_element[i] entries."""
    counts = np.diff(n_element)
    indices = [(i, j) for i, n in enumerate(counts.tolist()) for j in range(n)]
    return np.array(indices, np.int64).reshape(-1, 2), np.array([len(counts), counts.max(initial=0)], np.int64)


@contributed("SegmentExtraction")
def segment_extraction(input: Static):
    """The runs of equal numbers but zero: first and last position (excluded), and the number."""
    flat = input.reshape(-1)
    edges = np.flatnonzero(np.diff(flat)) + 1
    starts, stops = np.append(0, edges), np.append(edges, flat.size)
    runs = [(a, b) for a, b in zip(starts.tolist(), stops.tolist(), strict=True) if b > a and flat[a]]
    segments = np.array(runs, np.int64).reshape(-1, 2)
    return segments, flat[segments[:, 0]]


@contributed("SegmentSum", "ids start at 0 and increase by 0 or 1")
def segment_sum(data, segment_ids: Static):
    """The sums of the rows of each segment."""
    if segment_ids.ndim != 1 or segment_ids.size != data.shape[0]:
        raise ValueError(f"segment_ids ({segment_ids.shape}) must have an id for each of {data.shape[0]} rows")
    if segment_ids.size and (segment_ids[0] or not np.isin(np.diff(segment_ids), (0, 1)).all()):
        raise ValueError(f"segment_ids ({segment_ids.tolist()}) must start at 0 and increase by 0 or 1")
    starts = np.flatnonzero(np.append(1, np.diff(segment_ids)))[: segment_ids.size]
    stops = np.append(starts[1:], segment_ids.size)
    return xp.stack([data[a:b].sum(0) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)])


@contributed("Inverse", half="float32")
def inverse(input):
    """The inverse of a matrix."""
    return jnp.linalg.inv(jnp.asarray(input))


@contributed("NegPos")
def neg_pos(input):
    """The negative numbers, and the positive ones; zero elsewhere."""
    return xp.minimum(input, 0), xp.maximum(input, 0)

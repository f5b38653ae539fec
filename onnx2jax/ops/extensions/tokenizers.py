"""onnxruntime-extensions: the tokenizers of BERT and, by the package tokenizers, of byte pairs (BPE), and inverses."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from inspect import Parameter
from typing import Final, Literal

import numpy as np

from ... import compat
from ..registry import Static, taking
from . import contributed
from .strings import CASES, lower, strings

LONGEST: Final = 100
"""The characters of the longest word; longer ones are unknown."""
_SPACE = "\t\n\r \u00a0\u2000-\u200a\u202f\u205f\u3000"
_DROPPED = (
    "\x00-\x08\x0b\x0c\x0e-\x1f\x80-\x9f\u00ad\u0378\u0379\u0380-\u0383\u038b\u038d\u03a2\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206e\u2e9a\u2ef4-\u2efe"
)
_PUNCTUATION = re.compile(
    r"([!-/:-@\[-`{-~\u00a1\u00a7\u00ab\u00b6\u00b7\u00bb\u00bf\u037e\u0387\u2010-\u2027\u2030-\u2043\u2045-\u2051"
    r"\u2053-\u205e\u3001-\u3003\u3008-\u3011\u3014-\u301f\u3030\u303d])"
)
_OPENING, _CLOSING = (
    re.compile(f"{_PUNCTUATION.pattern}(?<![{others}])") for others in (r"!),.:>?\]}~%&*+;=^_`|#", r"$(<\[{%&*+;=^_`|#")
)
"""Punctuation with no space behind it, or before, in text made of tokens."""
_CHINESE = re.compile(
    "([\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f])"
)
_ACCENTED = {
    c: unicodedata.normalize("NFD", chr(c))[0] for c in range(0xC0, 0x100) if unicodedata.decomposition(chr(c))
}
_STRIPPED = {**_ACCENTED, **dict.fromkeys(range(0x300, 0x370))}
_KINDS = (
    f"{CASES}; accents of Latin-1 and combining marks go; punctuation is that of ASCII, Latin-1 and U+2010 to U+303D"
)


def words(text, do_lower_case, strip_accents, chinese=1, punctuation=1):
    """The words of a text: split at white space, and around punctuation and Chinese characters."""
    if strip_accents:
        text = text.translate(_STRIPPED)
    if do_lower_case:
        text = lower(text)
    if chinese:
        text = _CHINESE.sub(r" \1 ", text)
    if punctuation:
        text = _PUNCTUATION.sub(r" \1 ", text)
    return re.findall(f"[^{_SPACE}]+", re.sub(f"[{_DROPPED}]", "", text))


def pieces(word, vocabulary, mark, longest):
    """The longest pieces of a word that are in the vocabulary, from left to right; None for a rest that is not."""
    if len(word) > longest:
        return [None]
    parts, at = [], 0
    while at < len(word):
        prefix = mark if at else ""
        stop = next((s for s in range(len(word), at, -1) if prefix + word[at:s] in vocabulary), None)
        if stop is None:
            return [*parts, None]
        parts.append(prefix + word[at:stop])
        at = stop
    return parts


def _vocabulary(text):
    """Token -> id of a vocabulary file, a token each line; of equal ones the last counts."""
    return {token: i for i, token in enumerate(t for t in re.split("[\r\n]+", text) if t)}


def _ids(vocabulary, *tokens):
    if missing := [t for t in tokens if t not in vocabulary]:
        raise ValueError(f"the vocabulary lacks {', '.join(map(repr, missing))}")
    return [vocabulary[t] for t in tokens]


def _encoded(split, vocabulary, unknown, mark):
    """The ids of the words' pieces, and where each begins and ends, in UTF-8 with a space between words."""
    ids, spans, at = [], [], 0
    for word in split:
        for i, piece in enumerate(pieces(word, vocabulary, mark, LONGEST)):
            if piece is None:
                at += i > 0  # the unknown rest of a word counts as a word
                length = 1 if unknown == "[UNK]" else len(unknown.encode())
            else:
                length = len((piece.removeprefix(mark) if i else piece).encode())
            ids.append(vocabulary[piece or unknown])
            spans.append((at, at + length))
            at += length
        at += 1
    return ids, spans


_ATTRIBUTES: Final = {
    "vocab_file": Parameter.empty, "do_lower_case": 1, "do_basic_tokenize": Literal[1], "unk_token": "[UNK]",
    "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
    "tokenize_chinese_chars": 1, "strip_accents": 0, "tokenize_punctuation": 1, "remove_control_chars": 1,
    "suffix_indicator": "##", "max_length": -1,
    "truncation_strategy_name": Literal["longest_first", "only_first", "only_second", "longest_from_back"],
}  # fmt: skip


def _encode_plus(
    text, vocabulary, *, do_lower_case, unk_token, sep_token, pad_token, cls_token, mask_token, tokenize_chinese_chars,
    strip_accents, suffix_indicator, max_length, truncation_strategy_name, **_always_on,
):  # fmt: skip
    """Ids, types (0 or 1), mask and offsets of one text or of two, between [CLS] and [SEP]."""
    first, between, *_ = _ids(vocabulary, cls_token, sep_token, unk_token, pad_token, mask_token)
    split = [words(x, do_lower_case, strip_accents, tokenize_chinese_chars) for x in text.flat]
    tokens = [_encoded(s, vocabulary, unk_token, suffix_indicator) for s in split]
    if max_length > 2 and len(tokens) == 2 and sum(len(ids) for ids, _ in tokens) + 3 > max_length:
        raise ValueError(
            f"two texts exceed max_length ({max_length}), and onnxruntime-extensions does not truncate them as "
            f"{truncation_strategy_name!r} says: shorten them before the model"
        )
    kept = max_length - 2 if max_length > 2 else None
    ids, types, spans = [first], [0], [(0, 0)]
    for i, (numbers, where) in enumerate(tokens):
        ids += [*numbers[:kept], between]
        types += [i] * (len(numbers[:kept]) + 1)
        spans += [(0, 0)] * i + [*where, (0, 0)]
    return tuple(np.array(v, np.int64) for v in (ids, types, [1] * len(ids), spans[: len(ids)]))


@contributed(
    "BertTokenizer", f"one text or two, do_basic_tokenize=1; {_KINDS}; offset_mapping is that of words joined by spaces"
)
@taking(**_ATTRIBUTES)
def bert_tokenizer(text: Static, *, once, vocab_file, **attributes):
    """BERT's tokens of one text or of two: ids, types, mask and offsets."""
    if text.size not in (1, 2):
        raise ValueError(f"one text or two are tokenized at a time (there are {text.size})")
    return _encode_plus(text, once(_vocabulary, vocab_file), **attributes)


@contributed("HfBertTokenizer", f"two texts, do_basic_tokenize=1; {_KINDS}")
@taking(**_ATTRIBUTES)
def hf_bert_tokenizer(text: Static, *, once, vocab_file, **attributes):
    """BERT's tokens of two texts, as [1, n]: ids, mask and types."""
    if text.size != 2:
        raise ValueError(f"two texts are tokenized at a time (there are {text.size})")
    ids, types, mask, _ = _encode_plus(text, once(_vocabulary, vocab_file), **attributes)
    return tuple(v[None] for v in (ids, mask, types))


def _joined(tokens, mark, tidy):
    """The words of tokens, with spaces between, but where punctuation has none. A suffix that is first is left out."""
    text = ""
    for i, token in enumerate(tokens):
        if token.startswith(mark):
            text += token.removeprefix(mark) if i else ""
            continue
        glued = not text or (tidy and (_OPENING.match(text[-1]) or _CLOSING.match(token)))
        text += token if glued else f" {token}"
    return text


@contributed(
    "BertTokenizerDecoder", "skip_special_tokens keeps padding and unknown tokens, as onnxruntime-extensions does"
)
def bert_tokenizer_decoder(
    ids: Static, position: Static, *, once, vocab_file, unk_token="[UNK]", sep_token="[SEP]", pad_token="[PAD]",
    cls_token="[CLS]", mask_token="[MASK]", suffix_indicator="##", use_indices=0, skip_special_tokens=0,
    clean_up_tokenization_spaces=1,
):  # fmt: skip
    """The text of ids; with use_indices of each range [first, last) among them."""
    numbers = once(_vocabulary, vocab_file)
    vocabulary = list(numbers)
    _ids(numbers, unk_token, sep_token, pad_token, cls_token, mask_token)
    skipped = {sep_token, cls_token, mask_token} if skip_special_tokens else set()
    if outside := [i for i in ids.reshape(-1).tolist() if not 0 <= i < len(vocabulary)]:
        raise ValueError(f"the id {outside[0]} is outside the vocabulary of {len(vocabulary)} tokens")
    tokens = [vocabulary[i] for i in ids.reshape(-1).tolist()]
    ranges = position.reshape(-1, 2).tolist() if use_indices else [(0, len(tokens))]
    if wrong := [r for r in ranges if not 0 <= r[0] <= r[1] <= len(tokens)]:
        raise ValueError(f"the range {wrong[0]} is not within the {len(tokens)} ids")
    chosen = ([t for t in tokens[a:b] if t not in skipped] for a, b in ranges)
    return strings(_joined(c, suffix_indicator, clean_up_tokenization_spaces) for c in chosen)


@contributed("WordpieceTokenizer")
def wordpiece_tokenizer(
    words: Static, row_indices: Static, *, once, vocab, suffix_indicator, unknown_token, max_input_chars_per_word=200
):
    """The pieces of each word, and for each row the first piece, then where rows begin and end.

    Rows have the words from row_indices[i] to row_indices[i + 1]; without indices each string is a row.
    """
    vocabulary = once(json.loads, vocab)
    covers_all = not row_indices.size or (row_indices[0] == 0 and row_indices[-1] == words.size)
    if not covers_all or (np.diff(row_indices) <= 0).any():
        raise ValueError(
            f"row_indices ({row_indices.tolist()}) must increase from 0 to the number of words ({words.size})"
        )
    limits = vocabulary, suffix_indicator, max_input_chars_per_word
    made = [[p or unknown_token for word in x.split(" ") if word for p in pieces(word, *limits)] for x in words.flat]
    ends = np.cumsum([0, *map(len, made)], dtype=np.int64)
    ends = ends[row_indices] if row_indices.size else ends
    return strings(itertools.chain.from_iterable(made)), ends, ends[:-1].copy(), ends[1:].copy()


_NEEDS = "needs the extra `text` (tokenizers)"


def _tokenizer(vocab, merges, added):
    """A tokenizer of a vocabulary and merges as GPT-2's files have them."""
    tokenizers = compat.optional("tokenizers", "text")
    table = json.loads(vocab)
    lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
    model = tokenizers.models.BPE(vocab=table, merges=[tuple(line.split(" ")) for line in lines])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    extra = dict(line.rpartition("=")[::2] for line in added.split("\n") if line)
    if strange := [t for t, i in extra.items() if table.get(t, -1) != int(i)]:
        raise ValueError(f"added_token has {strange}, which vocab lacks or numbers differently: add them to vocab")
    known = [t for t in (*extra, "<|endoftext|>") if t in table]
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in dict.fromkeys(known)])
    return tokenizer


def _padded(rows, shape, padding_length, filler):
    """Lists of ids as one tensor of the longest length, or of ``padding_length``, and its mask."""
    length = max(map(len, rows), default=0) if padding_length == -1 else padding_length
    ids = np.full((len(rows), length), filler, np.int64)
    mask = np.zeros_like(ids)
    for i, row in enumerate(rows):
        kept = row[:length]
        ids[i, : len(kept)], mask[i, : len(kept)] = kept, 1
    return ids.reshape(*shape, length), mask.reshape(*shape, length)


@contributed("GPT2Tokenizer", f"{_NEEDS}; without offset_mapping; padding is 0", extra="text")
def gpt2_tokenizer(
    input_text: Static, *, vocab, merges, added_token="", padding_length=-1, model_name="GPT2", n_outputs, once
):
    """Ids and mask of each text, padded to the longest or to ``padding_length``, which also cuts."""
    if n_outputs > 2:
        raise NotImplementedError("offset_mapping is unsupported: remove the third output from the node")
    if model_name not in ("GPT2", "CodeGen"):
        raise NotImplementedError(f"model_name is {model_name!r}; only GPT2 and CodeGen split text as here")
    tokenizer = once(_tokenizer, vocab, merges, added_token)
    rows = [tokenizer.encode(x, add_special_tokens=False).ids for x in input_text.flat]
    return _padded(rows, input_text.shape, padding_length, 0)


def _letters(byte_decoder):
    """The byte of each letter of GPT-2's alphabet."""
    return {chr(int(c)): int(b) for c, b in (line.split("\t") for line in byte_decoder.split("\n") if line)}


@contributed("BpeDecoder", "one text; tokens of GPT-2's byte alphabet and added ones")
def bpe_decoder(
    ids: Static, *, id_vocab, byte_decoder, added_tokens="", all_special_ids="", once, skip_special_tokens=0
):
    """The text of ids, a vector or [1, n]."""
    if ids.ndim > 1 and ids.shape[:-1] != (1,) * (ids.ndim - 1):
        raise ValueError(f"ids are decoded one text at a time (they have the shape {ids.shape})")
    tokens = once(str.split, id_vocab, "\n")
    special = {int(i) for i in all_special_ids.split()} if skip_special_tokens else ()
    added = dict(line.split("\t", 1) for line in added_tokens.split("\n") if line)
    letters = once(_letters, byte_decoder)
    made = bytearray()
    for i in ids.reshape(-1).tolist():
        if not 0 <= i < len(tokens):
            raise ValueError(f"the id {i} is outside the vocabulary of {len(tokens)} tokens")
        if i in special:
            continue
        if str(i) in added:
            made += added[str(i)].encode()
        elif strange := set(tokens[i]) - letters.keys():
            raise NotImplementedError(f"byte_decoder lacks {strange.pop()!r} of the token {tokens[i]!r}")
        else:
            made += bytes(letters[c] for c in tokens[i])
    try:
        return strings([made.decode()], (1,))
    except UnicodeDecodeError as error:
        raise ValueError(f"the ids end, or begin, within a character: {error}") from None

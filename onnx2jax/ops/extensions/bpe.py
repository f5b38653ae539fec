"""onnxruntime-extensions: byte-level tokenizers of pairs (BPE), by the package tokenizers, and their inverse."""

from __future__ import annotations

import json

import numpy as np

from ... import compat
from ..registry import Static
from . import contributed
from .strings import strings

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


@contributed("GPT2Tokenizer", f"{_NEEDS}; without offset_mapping; padding is 0")
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


def _tokens(id_vocab):
    return id_vocab.split("\n")


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
    tokens = once(_tokens, id_vocab)
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

"""Operators of onnxruntime-extensions: strings, tokenizers and images, on the host, and replacements of others.

Their package documents few details; where it leaves them open, they are as its library 0.15 computes them.
"""

from __future__ import annotations

from typing import Final

from ..registry import op

DOMAINS: Final = ("ai.onnx.contrib", "com.microsoft.extensions")
"""The domain that exporters of tokenizers write, and the one of the package's pre- and post-processing tool."""


def contributed(name, limits="", **traits):
    """Registers a function under both names of the domain."""

    def register(function):
        for domain in DOMAINS:
            op(name, domain=domain, limits=limits, **traits)(function)
        return function

    return register


_TOKENS = "tokenize before the model, as with the package tokenizers, and pass token ids to the nodes behind it"
_TEXT = "turn ids into text behind the model, as with the package tokenizers"
_BYTES = "it matches bytes by C++'s std::regex; use {}, whose expressions are RE2's"
_AUDIO = "decode audio before the model, and pass samples"
REPLACEMENTS: Final = {
    **dict.fromkeys(
        ("BasicTokenizer", "CLIPTokenizer", "HfJsonTokenizer", "RobertaTokenizer", "SentencepieceTokenizer"), _TOKENS
    ),
    **dict.fromkeys(("BlingFireSentenceBreaker", "SpmTokenizer", "TrieTokenizer", "WhisperTokenizer"), _TOKENS),
    **dict.fromkeys(("SentencepieceDecoder", "TrieDetokenizer"), _TEXT),
    **dict.fromkeys(("AudioDecoder", "AudioDecoderEx", "MergeSignalSegments", "SplitSignalSegments"), _AUDIO),
    "DrawBoundingBoxes": "draw behind the model, as with pillow's ImageDraw, and take the boxes as an output",
    "StftNorm": "use STFT of ai.onnx, and the squares of its two parts",
    "StringECMARegexReplace": _BYTES.format("StringRegexReplace"),
    "StringECMARegexSplitWithOffsets": _BYTES.format("StringRegexSplitWithOffsets"),
    "StringToHashBucket": "its hash is that of one C++ compiler; use MurmurHash3 of com.microsoft",
    "StringToHashBucketFast": "the hash is FarmHash, which no package here has; use MurmurHash3 of com.microsoft",
    "ImageReader": "it reads files by name; read them before the model, and pass the bytes to DecodeImage",
    **dict.fromkeys(
        ("RaggedTensorToDense", "StringRaggedTensorToDense"), "its inputs are undocumented; use RaggedTensorToSparse"
    ),
    "GaussianBlur": "removed from onnxruntime-extensions; use Conv with the weights of the kernel",
    "AzureAudioToText": "it calls a service over the network, which a function of arrays cannot",
    "OpenAIAudioToText": "it calls a service over the network, which a function of arrays cannot",
}
"""Operators of the domain that are unsupported on purpose, with what to do instead."""

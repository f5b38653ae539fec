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


_REPLACEMENTS: Final = {
    "tokenize before the model, as with the package tokenizers, and pass token ids to the nodes behind it": """
        BasicTokenizer BlingFireSentenceBreaker CLIPTokenizer HfJsonTokenizer RobertaTokenizer SentencepieceTokenizer
        SpmTokenizer TrieTokenizer WhisperTokenizer""",
    "turn ids into text behind the model, as with the package tokenizers": "SentencepieceDecoder TrieDetokenizer",
    "decode audio before the model, and pass samples": """
        AudioDecoder AudioDecoderEx MergeSignalSegments SplitSignalSegments""",
    "draw behind the model, as with pillow's ImageDraw, and take the boxes as an output": "DrawBoundingBoxes",
    "use STFT of ai.onnx, and the squares of its two parts": "StftNorm",
    "it matches bytes by C++'s std::regex; use StringRegexReplace, whose expressions are RE2's": """
        StringECMARegexReplace""",
    "it matches bytes by C++'s std::regex; use StringRegexSplitWithOffsets, whose expressions are RE2's": """
        StringECMARegexSplitWithOffsets""",
    "its hash is that of one C++ compiler; use MurmurHash3 of com.microsoft": "StringToHashBucket",
    "the hash is FarmHash, which no package here has; use MurmurHash3 of com.microsoft": "StringToHashBucketFast",
    "it reads files by name; read them before the model, and pass the bytes to DecodeImage": "ImageReader",
    "its inputs are undocumented; use RaggedTensorToSparse": "RaggedTensorToDense StringRaggedTensorToDense",
    "removed from onnxruntime-extensions; use Conv with the weights of the kernel": "GaussianBlur",
    "it calls a service over the network, which a function of arrays cannot": "AzureAudioToText OpenAIAudioToText",
}
REPLACEMENTS: Final = {name: advice for advice, names in _REPLACEMENTS.items() for name in names.split()}
"""Operators of the domain that are unsupported on purpose, with what to do instead."""

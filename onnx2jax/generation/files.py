"""From files to a decoder: the model or models, and what lies beside them about tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .. import compat
from ..errors import ModelError
from ..model.convert import convert
from ..model.model import Model
from .decoder import Decoder
from .prompts import as_endings

NAMES: Final = (
    ("model.onnx", None),
    ("decoder_with_past_model.onnx", "decoder_model.onnx"),
    ("decoder_model_merged.onnx", None),
)
"""What exporters call the file of a step, and that of the first call where it is another; the first that is there."""


def decoder(
    source: Any,
    *,
    prefill: Any = None,
    embed: Any = None,
    stop: Any = None,
    pad: int | None = None,
    context: int | None = None,
    **converting: Any,
) -> Decoder:
    """A decoder that generates, from a file or a model that keeps its past.

    Its caches are found by the graph and by their names, and become arrays of fixed length, so that two programs are
    compiled in all. What ``genai_config.json``, ``generation_config.json`` or ``config.json`` beside the file say about
    the end of a text, padding and the longest text is followed.

    Args:
        source: a Model, the path of a file, or that of a folder as onnxruntime-genai's builder and optimum write it.
        prefill: the model of the first call, where that is another: what optimum calls ``decoder_model.onnx``.
        embed: for a decoder that takes embeddings (inputs_embeds): the model or file that makes them of tokens and,
            say, of what an encoder of images gives; or a function of tokens int[batch, count]. What genai_config.json
            calls the embedding, when left out.
        stop: what ends a text: a token, or several, each a token or a list of tokens.
        pad: the token that stands behind a text's end.
        context: the most tokens, prompt included.
        **converting: keywords of ``convert``.

    Raises:
        UnsupportedError: the model has no caches, or nothing that is an input for tokens.
        ModelError: a folder without a decoder in it.

    >>> import onnx2jax
    >>> counting = onnx2jax.decoder(onnx2jax.demo_decoder())
    >>> counting.context, counting.vocabulary
    (256, 128)
    """
    said: dict[str, Any] = {}
    if isinstance(source, str | Path):
        source, prefill, said = _found(Path(source), prefill)
    embed = said.get("embed") if embed is None else embed
    if embed is not None and not callable(embed):
        embed = convert(embed, **converting)
    model = source if isinstance(source, Model) else convert(source, **converting)
    first = prefill if prefill is None or isinstance(prefill, Model) else convert(prefill, **converting)
    return Decoder(
        model,
        first,
        stop=as_endings(said.get("stop", ()) if stop is None else stop),
        pad=said.get("pad") if pad is None else pad,
        context=said.get("context") if context is None else context,
        embed=embed,
    )


def tokenizer(source: Path | str) -> Any:
    """The tokenizer that lies beside a model, as a ``tokenizers.Tokenizer``.

    Raises:
        ImportError: tokenizers is not installed.
        FileNotFoundError: there is no tokenizer.json.
    """
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    if not (file := folder / "tokenizer.json").is_file():
        raise FileNotFoundError(2, "there is no tokenizer here; give token ids", str(file))
    return compat.optional("tokenizers", "text").Tokenizer.from_file(str(file))


def _found(path: Path, prefill: Any) -> tuple[Path, Any, dict[str, Any]]:
    """The file of a step, the first call's, and what configurations beside them say."""
    folder = path if path.is_dir() else path.parent
    genai = _json(folder / "genai_config.json").get("model", {})
    said = _said({**_json(folder / "config.json"), **_json(folder / "generation_config.json"), **genai})
    embedding = genai.get("embedding", {}).get("filename")
    if embedding and (folder / embedding).is_file():
        said["embed"] = folder / embedding
    if not path.is_dir():
        return path, prefill, said
    own = genai.get("decoder", {}).get("filename")
    for name, first in (((own, None),) if own else ()) + NAMES:
        if all((folder / n).is_file() for n in (name, None if prefill else first) if n):
            return folder / name, prefill or (folder / first if first else None), said
    raise ModelError(f"{folder} has no {' or '.join(n for n, _ in NAMES)}: name the decoder's file")


def _said(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says, in our words."""
    context = next((facts[n] for n in ("context_length", "max_position_embeddings", "n_positions") if n in facts), None)
    said = {"stop": facts.get("eos_token_id"), "pad": facts.get("pad_token_id"), "context": context}
    return {n: v for n, v in said.items() if v is not None}


def _json(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as e:
        raise ModelError(f"{file} is no JSON: {e}") from None
    return facts if isinstance(facts, dict) else {}

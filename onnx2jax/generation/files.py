"""Loads a decoder and its tokenizer from files, with the configuration files beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .. import progress
from ..errors import InputTypeError, ModelError, ShardingError
from ..ir.file import check_keywords
from ..model.convert import convert
from ..model.model import Model
from ..proto.files import path_of
from ..proto.foreign import DECODERS, without_model
from ..sharding.plans import mesh_of
from ..sharding.stages import Staged
from .arguments import check_loading
from .decoder import Decoder
from .text import Tokenizer, read_json

PREFILLS: Final = {"decoder_with_past_model.onnx": "decoder_model.onnx"}
"""Exporters' name of the step file -> that of the prefill file, if it is separate."""


def decoder(
    source: Any,
    *,
    prefill: Any = None,
    embed: Any = None,
    stop: Any = None,
    pad: int | None = None,
    context: int | None = None,
    tokenizer: Any = None,
    **converting: Any,
) -> Decoder:
    """A ``Decoder`` that generates text, from a model with KV caches among its inputs.

    The caches are recognised by the graph and by their names, and become fixed-length arrays, so that only two programs
    are compiled. Stop tokens, the padding token and the context length are read from ``genai_config.json``,
    ``generation_config.json`` or ``config.json`` beside the file.

    Args:
        source: the path of a file, or that of a folder as onnxruntime-genai's builder and optimum write it; or a Model,
            of which no files beside it are read.
        prefill: the model of the first call, if it is separate (optimum: ``decoder_model.onnx``).
        embed: for a decoder with inputs_embeds: the model or file that computes them from tokens and, for example,
            image features; or a function of tokens int[batch, count]. Defaults to the embedding of genai_config.json.
        stop: stop sequences: a token, or several, each a token or a list of tokens.
        pad: the padding token after the end of a text.
        context: the maximum number of tokens, prompt included.
        tokenizer: for prompts that are text: a folder with ``tokenizer.json``, that file, or an object with ``encode``
            and ``decode``; False for token ids alone. Defaults to the files beside the model. Needs the extra ``text``.
        **converting: keywords of ``convert``.

    Raises:
        UnsupportedError: the model has no KV caches, or no token input.
        ModelError: the folder contains no decoder, or a file of its configuration or tokenizer is broken.
        FileNotFoundError: there is no file at ``source`` or ``tokenizer``.
        InputTypeError: keywords of ``convert`` with a Model, which is converted already.
        ShardingError: it is to run in pipeline stages.

    >>> import onnx2jax
    >>> counting = onnx2jax.decoder(onnx2jax.demo_decoder())
    >>> counting.context, counting.vocabulary
    (256, 128)
    """
    check_loading(converting)
    check_keywords(converting, decoder, convert)
    _check_stages(converting.get("stages") is not None)
    settings: dict[str, Any] = {}
    if isinstance(source, str | os.PathLike):
        source, prefill, settings = _locate(path_of(source), prefill)
    elif isinstance(source, Model) and converting and not any(map(_is_file, (prefill, embed))):
        raise InputTypeError(
            f"the Model is converted already: pass {', '.join(converting)} to onnx2jax.convert(...) instead"
        )
    arguments = {"stop": stop, "pad": pad, "context": context, "embed": embed, "tokenizer": tokenizer}
    settings |= {n: v for n, v in arguments.items() if v is not None}
    if "embed" in settings and not callable(settings["embed"]):
        settings["embed"] = convert(settings["embed"], **{**converting, "scan_layers": False})
    model = source if isinstance(source, Model) else convert(source, **converting)
    first = prefill if prefill is None or isinstance(prefill, Model) else convert(prefill, **converting)
    _check_stages(any(isinstance(m.placement, Staged) for m in (model, first) if m is not None))
    with progress.stage("finding the decoder's KV caches"):
        return Decoder(model, first, **settings)


def _check_stages(has_stages: bool) -> None:
    """Raise ShardingError if a decoder is to run in pipeline stages."""
    if has_stages:
        raise ShardingError(
            "a decoder takes no pipeline stages: its loop is one program, and each stage is one of its own. Shard "
            f"its products instead: onnx2jax.decoder(..., mesh={mesh_of('tensor')}, shardings='tensor')"
        )


def _is_file(source: Any) -> bool:
    return not (source is None or isinstance(source, Model) or callable(source))


def tokenizer_beside(source: Path | str) -> Any:
    """The ``tokenizers.Tokenizer`` of the tokenizer.json beside a model.

    Raises:
        ImportError: tokenizers is not installed.
        FileNotFoundError: there is no tokenizer.json.
    """
    path = path_of(source)
    return Tokenizer(path if path.is_dir() else path.parent).library


def _locate(path: Path, prefill: Any) -> tuple[Path, Any, dict[str, Any]]:
    """The step file, the prefill file or None, and the settings in the configuration files beside them."""
    folder = path if path.is_dir() else path.parent
    genai = read_json(folder / "genai_config.json").get("model", {})
    settings = _settings({**read_json(folder / "config.json"), **read_json(folder / "generation_config.json"), **genai})
    embedding = genai.get("embedding", {}).get("filename")
    if embedding and (folder / embedding).is_file():
        settings["embed"] = folder / embedding
    if (folder / "tokenizer.json").is_file():
        settings["tokenizer"] = folder
    if not path.is_dir():
        return path, prefill, settings
    named = genai.get("decoder", {}).get("filename")
    for name in (named, *DECODERS) if named else DECODERS:
        first = PREFILLS.get(name)
        if all((folder / n).is_file() for n in (name, None if prefill else first) if n):
            return folder / name, prefill or (folder / first if first else None), settings
    others = sorted(p.name for p in folder.glob("*.onnx"))
    fix = f"name the decoder's file, of {', '.join(others)}" if others else f"it is {without_model(folder)}"
    raise ModelError(f"{folder} has no {' or '.join(DECODERS)}: {fix}")


def _settings(facts: Mapping[str, Any]) -> dict[str, Any]:
    """``stop``, ``pad`` and ``context`` from a configuration, where it has them."""
    context = next((facts[n] for n in ("context_length", "max_position_embeddings", "n_positions") if n in facts), None)
    settings = {"stop": facts.get("eos_token_id"), "pad": facts.get("pad_token_id"), "context": context}
    return {n: v for n, v in settings.items() if v is not None}

"""Families of transformers, tiny and random: encoders, decoders, both, vision, speech, several modalities, states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from . import transformer_inputs as feed
from .case import Case, Export
from .torch_exports import DYNAMO, EXPORTERS, export, flat
from .vision_operators import torchvision

SMALL: Final = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "initializer_range": 0.2,  # numbers to tell heads and layers apart
}
"""What most configurations call the same; a configuration keeps what it doesn't know as it is."""


GROUPED: Final = {"num_key_value_heads": 2}


LAYERED: Final = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 0,
    "init_std": 0.2,
}
PATCHES: Final = {"image_size": 32, "patch_size": 8}
EYE: Final = {**SMALL, **PATCHES}
WINDOWS: Final = {
    "image_size": 32,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 16,
    "depths": [2, 1],
    "num_heads": [2, 4],
    "num_attention_heads": None,
}
RESNET: Final = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
}
BACKBONE: Final = {
    "backbone_config": RESNET,
    "use_timm_backbone": False,
    "backbone": None,
    "use_pretrained_backbone": False,
}
SEGFORMER: Final = {
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 4],
    "decoder_hidden_size": 16,
}
MOBILE: Final = {
    "hidden_sizes": [16, 20, 24],
    "neck_hidden_sizes": [8, 8, 12, 16, 16, 16, 32],
    "image_size": 64,
    "num_attention_heads": 2,
    "initializer_range": 0.6,
}
WAVES: Final = {
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
FRAMES: Final = {
    "input_feat_per_channel": 8,
    "conv_channels": 16,
    "max_source_positions": 64,
    "max_target_positions": 64,
}
SERIES_OF_TWO: Final = {
    "num_input_channels": 2,
    "context_length": 32,
    "patch_length": 8,
    "patch_stride": 8,
    "d_model": 32,
    "ffn_dim": 48,
    "prediction_length": 4,
    "init_std": 0.2,
}
FORECAST: Final = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2, 4],
    "num_time_features": 2,
    "d_model": 32,
}
IMAGES: Final = ((2, 32), (3, 32))
BATCHES: Final = ((2, 8), (3, 8))
"""Two batches of one length, where an exporter writes the length into the file."""


@dataclass(frozen=True)
class Family:
    """A row: a class of transformers, its configuration, the inputs that it takes.

    Attributes:
        model: the class.
        feed: the inputs for a batch and a length, by name.
        config: over SMALL.
        exporters: which of the two write it.
        name: where the class does not say it all.
        known: as in Case, for each exporter.
        sizes: two batches and lengths.
    """

    model: str
    feed: Callable[..., dict[str, Any]]
    config: Mapping[str, Any] = field(default_factory=dict)
    exporters: tuple[str, ...] = (DYNAMO,)
    name: str = ""
    known: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], tuple[int, int]] = ((2, 7), (3, 11))


def _make(family: Family, exporter: str, folder: Path) -> Export:
    torchvision()
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, family.model)
    config = {k: v for k, v in {**SMALL, **family.config}.items() if v is not None}
    fed = [family.feed(*size) for size in family.sizes]
    module = _called(model(model.config_class(**config)), tuple(fed[0]))
    return export(module, [list(f.values()) for f in fed], folder, exporter, names=list(fed[0]))


def _called(model: Any, names: tuple[str, ...]) -> Any:
    """A module of positional tensors, which are what the model takes by name; of keys and values, a cache is made."""
    import torch
    from transformers import DynamicCache

    class Called(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, a: Any, b: Any = None, c: Any = None, d: Any = None, e: Any = None, f: Any = None) -> Any:
            given = dict(zip(names, (a, b, c, d, e, f), strict=False))
            if "key_0" not in given:
                return flat(self.model(**given))
            past = [(given.pop(f"key_{i}"), given.pop(f"value_{i}")) for i in range(2)]
            results = self.model(**given, past_key_values=DynamicCache(past), use_cache=True)
            return results.logits, [(layer.keys, layer.values) for layer in results.past_key_values.layers]

    return Called()


ENCODERS: Final = (
    Family("BertModel", feed.text, exporters=EXPORTERS),
    Family("RobertaModel", feed.text, exporters=EXPORTERS),
    Family("DistilBertModel", feed.text, {"dim": 32, "hidden_dim": 48}, exporters=EXPORTERS),
    Family("AlbertModel", feed.text, {"embedding_size": 16}, exporters=EXPORTERS),
    Family("ElectraModel", feed.text, {"embedding_size": 16}, exporters=EXPORTERS),
    Family(
        "DebertaV2Model",
        feed.text,
        {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8},
        exporters=EXPORTERS,
    ),
    Family(
        "MobileBertModel",
        feed.text,
        {"embedding_size": 32, "intra_bottleneck_size": 16, "num_feedforward_networks": 2},
        exporters=EXPORTERS,
    ),
    Family("XLMRobertaModel", feed.text, exporters=EXPORTERS),
    Family("MPNetModel", feed.text, exporters=EXPORTERS),
    Family("XLMRobertaForTokenClassification", feed.text, exporters=EXPORTERS),
    Family("BigBirdModel", feed.text, {"attention_type": "original_full"}, exporters=EXPORTERS),
    Family("ModernBertModel", feed.text, {"local_attention": 4}, exporters=EXPORTERS),
    Family(
        "FunnelModel",
        feed.text,
        {"d_model": 32, "d_head": 8, "d_inner": 48, "n_head": 4, "block_sizes": [1, 1], "num_hidden_layers": None},
        exporters=EXPORTERS,
        sizes=BATCHES,
    ),
    Family("FNetModel", feed.tokens),
)
DECODERS: Final = (
    Family("GPT2LMHeadModel", feed.text, exporters=EXPORTERS),
    Family("GPT2LMHeadModel", feed.step, name="GPT2LMHeadModel, one step"),
    Family(
        "GPTNeoForCausalLM",
        feed.text,
        {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    Family("GPTJForCausalLM", feed.text, {"rotary_dim": 4}),
    Family("GPTNeoXForCausalLM", feed.text),
    Family("OPTForCausalLM", feed.text, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("BloomForCausalLM", feed.text),
    Family("LlamaForCausalLM", feed.text, GROUPED, exporters=EXPORTERS),
    Family("LlamaForCausalLM", feed.step, name="LlamaForCausalLM, one step"),
    Family("MistralForCausalLM", feed.text, {**GROUPED, "sliding_window": 4}),
    Family("Qwen2ForCausalLM", feed.text, GROUPED),
    Family("Qwen3ForCausalLM", feed.text, {**GROUPED, "head_dim": 8}),
    Family("GemmaForCausalLM", feed.text, {**GROUPED, "head_dim": 8}),
    Family("Gemma2ForCausalLM", feed.text, {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    Family("Gemma3ForCausalLM", feed.text, {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    Family("PhiForCausalLM", feed.text),
    Family("Phi3ForCausalLM", feed.text, GROUPED),
    Family("FalconForCausalLM", feed.text, {"alibi": False}),
    Family("MptForCausalLM", feed.text, {"expansion_ratio": 2}),
    Family("OlmoForCausalLM", feed.text, GROUPED),
    Family("Olmo2ForCausalLM", feed.text, GROUPED),
    Family("Starcoder2ForCausalLM", feed.text, GROUPED),
    Family("StableLmForCausalLM", feed.text, GROUPED),
    Family("CohereForCausalLM", feed.text, GROUPED),
    Family(
        "MixtralForCausalLM",
        feed.text,
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"},
    ),
    Family("MambaForCausalLM", feed.tokens, {"state_size": 4}, sizes=BATCHES),
    Family(
        "Mamba2ForCausalLM",
        feed.tokens,
        {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    ),
    Family("FalconMambaForCausalLM", feed.tokens, {"state_size": 4}, sizes=BATCHES),
)
NO_GRAD: Final = "positions of sines, which transformers looks up under no_grad(), are weights like others in the file"
SINES: Final = {exporter: {"grad": NO_GRAD} for exporter in EXPORTERS}
BOTH: Final = (
    Family("T5ForConditionalGeneration", feed.pair, {"d_kv": 8, "d_ff": 48}, exporters=EXPORTERS),
    Family("BartForConditionalGeneration", feed.pair, LAYERED, exporters=EXPORTERS),
    Family("MBartForConditionalGeneration", feed.pair, LAYERED),
    Family("MarianMTModel", feed.pair, {**LAYERED, "d_model": 32}, exporters=EXPORTERS, known=SINES),
    Family("PegasusForConditionalGeneration", feed.pair, {**LAYERED, "d_model": 32}, exporters=EXPORTERS, known=SINES),
    Family("M2M100ForConditionalGeneration", feed.pair, {**LAYERED, "d_model": 32}, exporters=EXPORTERS),
)
VISION: Final = (
    Family("ViTForImageClassification", feed.image, PATCHES, exporters=EXPORTERS, sizes=IMAGES),
    Family("BeitModel", feed.image, {**PATCHES, "use_relative_position_bias": True}, sizes=IMAGES),
    Family("DeiTModel", feed.image, PATCHES, exporters=EXPORTERS, sizes=IMAGES),
    Family("Dinov2Model", feed.image, PATCHES, sizes=IMAGES),
    Family("SwinModel", feed.image, WINDOWS, exporters=EXPORTERS, sizes=IMAGES),
    Family("Swinv2Model", feed.image, WINDOWS, sizes=IMAGES),
    Family("SegformerForSemanticSegmentation", feed.image, SEGFORMER, sizes=((2, 64), (3, 96))),
    Family(
        "DetrForObjectDetection",
        feed.image,
        {**LAYERED, "num_queries": 5, **BACKBONE},
        sizes=((1, 64), (2, 64)),
    ),
    Family("YolosForObjectDetection", feed.image, {**PATCHES, "image_size": [32, 32]}, sizes=IMAGES),
    Family("MobileViTForImageClassification", feed.image, MOBILE, sizes=((2, 64), (3, 64))),
    Family(
        "ConvNextModel",
        feed.image,
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        sizes=((2, 32), (3, 64)),
    ),
    Family("CLIPVisionModel", feed.image, PATCHES, exporters=EXPORTERS, sizes=IMAGES),
    Family("SiglipVisionModel", feed.image, PATCHES, sizes=IMAGES),
)
SPEECH: Final = (
    Family("Wav2Vec2ForCTC", feed.wave, WAVES, exporters=EXPORTERS, sizes=((2, 160), (3, 200))),
    Family("HubertModel", feed.wave, WAVES, sizes=((2, 160), (3, 200))),
    Family("WavLMModel", feed.wave, WAVES, sizes=((2, 160), (3, 200))),
    Family("SEWModel", feed.wave, {**WAVES, "squeeze_factor": 2}, sizes=((2, 160), (3, 208))),
    Family(
        "WhisperForConditionalGeneration",
        feed.heard,
        {**LAYERED, "num_mel_bins": 8, "max_source_positions": 16},
    ),
    Family(
        "WhisperForAudioClassification",  # of the encoder alone
        feed.bands,
        {**LAYERED, "num_mel_bins": 8, "max_source_positions": 16, "d_model": 32},
        exporters=EXPORTERS,
        sizes=IMAGES,
    ),
    Family("Speech2TextForConditionalGeneration", feed.frames, {**LAYERED, **FRAMES}),
    Family(
        "ASTForAudioClassification",
        feed.spectrum,
        {"max_length": 32, "num_mel_bins": 16, "patch_size": 8},
        sizes=IMAGES,
    ),
)
SEVERAL: Final = (
    Family("CLIPTextModel", feed.text, exporters=EXPORTERS),
    Family(
        "CLIPModel",
        feed.captioned,
        {"text_config": SMALL, "vision_config": EYE, "projection_dim": 16},
        exporters=EXPORTERS,
    ),
    Family("SiglipModel", feed.captioned, {"text_config": SMALL, "vision_config": EYE}),
    Family("BlipTextModel", feed.text, {"encoder_hidden_size": 32}),
    Family("BlipVisionModel", feed.image, PATCHES, sizes=IMAGES),
)
SERIES: Final = (
    Family("PatchTSTForPrediction", feed.series, SERIES_OF_TWO, sizes=((2, 32), (3, 32))),
    Family("TimeSeriesTransformerModel", feed.forecast, {**LAYERED, **FORECAST}, sizes=((2, 12), (3, 12))),
)
GROUPS: Final = {
    "encoders": ENCODERS,
    "decoders": DECODERS,
    "encoder-decoders": BOTH,
    "vision": VISION,
    "speech": SPEECH,
    "modalities": SEVERAL,
    "series": SERIES,
}

REFUSED: Final[dict[str, str]] = {
    "LongformerModel / torch.onnx dynamo": "GuardOnDataDependentSymNode, at chunks whose number is read from a tensor",
    "ViltModel / torch.onnx dynamo": "GuardOnDataDependentSymNode",
    "LlavaForConditionalGeneration / torch.onnx dynamo": "ConversionError, in the step from torch's program to ONNX",
    "MixtralForCausalLM with grouped products / torch.onnx dynamo": "ConversionError, in the same step; with "
    "experts_implementation='batched_mm' it is written",
    "WhisperForConditionalGeneration / torch.onnx script": "UnsupportedOperatorError: Exporting the operator "
    "'aten::diff' to ONNX opset version 20 is not supported",
    "FNetModel / torch.onnx script": "UnsupportedOperatorError: Exporting the operator 'aten::fft_fftn' to ONNX opset "
    "version 20 is not supported",
}
"""What an exporter itself does not write, and what it says."""


def _case(group: str, family: Family, exporter: str) -> Case:
    name = family.name or family.model
    return Case(
        f"transformers: {group}",
        name,
        exporter,
        lambda folder: _make(family, exporter, folder),
        needs=("torch", "transformers"),
        known=family.known.get(exporter, {}),
    )


CASES: Final = tuple(_case(g, f, e) for g, rows in GROUPS.items() for f in rows for e in f.exporters)

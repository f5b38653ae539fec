"""Inputs of transformers, by the names that they are given by, for a batch and a length."""

from __future__ import annotations

from typing import Any


def _ids(batch: int, length: int) -> Any:
    import torch

    return torch.randint(3, 99, (batch, length))


def text(batch: int, length: int) -> dict[str, Any]:
    """Tokens, the last two of the first text masked."""
    import torch

    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, -2:] = 0
    return {"input_ids": _ids(batch, length), "attention_mask": mask}


def tokens(batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": _ids(batch, length)}


def step(batch: int, length: int) -> dict[str, Any]:
    """One more token after those whose keys and values, of two layers and four heads, are given."""
    import torch

    past = {name: torch.randn(batch, 4, length, 8) for name in ("key_0", "value_0", "key_1", "value_1")}
    return {"input_ids": _ids(batch, 1), "attention_mask": torch.ones(batch, length + 1, dtype=torch.int64), **past}


def pair(batch: int, length: int) -> dict[str, Any]:
    return {**text(batch, length), "decoder_input_ids": _ids(batch, length - 2)}


def image(batch: int, size: int) -> dict[str, Any]:
    import torch

    return {"pixel_values": torch.randn(batch, 3, size, size)}


def captioned(batch: int, length: int) -> dict[str, Any]:
    return {**text(batch, length), **image(batch, 32)}


def wave(batch: int, length: int) -> dict[str, Any]:
    import torch

    return {"input_values": torch.randn(batch, length)}


def bands(batch: int, length: int) -> dict[str, Any]:
    """What Whisper's encoder takes: eight bands of a spectrogram, of twice its source positions."""
    import torch

    return {"input_features": torch.randn(batch, 8, length)}


def heard(batch: int, length: int) -> dict[str, Any]:
    """What Whisper takes: a spectrogram, and tokens."""
    return {**bands(batch, 32), "decoder_input_ids": _ids(batch, length)}


def frames(batch: int, length: int) -> dict[str, Any]:
    import torch

    mask = torch.ones(batch, 4 * length, dtype=torch.int64)
    mask[0, -5:] = 0
    features = torch.randn(batch, 4 * length, 8)
    return {"input_features": features, "attention_mask": mask, "decoder_input_ids": _ids(batch, length)}


def spectrum(batch: int, length: int) -> dict[str, Any]:
    import torch

    return {"input_values": torch.randn(batch, length, 16)}


def series(batch: int, length: int) -> dict[str, Any]:
    import torch

    return {"past_values": torch.randn(batch, length, 2)}


def forecast(batch: int, length: int) -> dict[str, Any]:
    import torch

    past, future = torch.randn(batch, length, 2), torch.randn(batch, 4, 2)
    return {
        "past_values": torch.randn(batch, length),
        "past_time_features": past,
        "past_observed_mask": torch.ones(batch, length),
        "future_values": torch.randn(batch, 4),
        "future_time_features": future,
    }

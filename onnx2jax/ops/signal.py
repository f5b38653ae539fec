"""Fourier transforms, windows and the mel scale. Complex numbers are pairs (real, imaginary) in the last dimension."""

from __future__ import annotations

import numpy as np
from jax import lax

from ..proto.types import to_dtype
from .arrays import axis_of, check_shape, counting, is_known, xp
from .registry import Static, op


def _complex(x):
    """[..., 1] -> real [...]; [..., 2] -> complex [...]."""
    if x.shape[-1] not in (1, 2):
        raise ValueError(f"the last extent must be 1 (real) or 2 (real, imaginary), not {x.shape[-1]}")
    if x.shape[-1] == 1:
        return x[..., 0]
    return x[..., 0] + 1j * x[..., 1] if is_known(x) else lax.complex(x[..., 0], x[..., 1])


def to_parts(z):
    return xp.stack([z.real, z.imag], axis=-1)


def _mirrored(signal, length, axis):
    """The full transform of a real signal: one half computed, the other its conjugate mirror image, exactly."""
    n = signal.shape[axis] if length is None else length
    half = xp.fft.rfft(signal, n, axis)
    return xp.concatenate([half, xp.take(half, np.arange((n + 1) // 2 - 1, 0, -1), axis).conj()], axis)


def _count(value):
    if (count := None if value is None else value.item()) is not None and count < 0:
        raise ValueError(f"a length ({count}) must not be negative")
    return count


@op("DFT", since=20, half="float32", heavy=True, unsharded=True, wide=True)
def dft(input, dft_length: Static = None, axis: Static = None, *, inverse=0, onesided=0):
    """The discrete Fourier transform along one axis."""
    axis = axis_of(-2 if axis is None else np.asarray(axis).item(), input.ndim)
    if axis == input.ndim - 1:
        raise ValueError(f"axis {axis} contains the real and imaginary parts; choose a signal axis")
    signal, length, real = _complex(input), _count(dft_length), input.shape[-1] == 1
    if onesided and real == bool(inverse):
        need = "a complex input, last dimension 2" if inverse else "a real input, last dimension 1"
        raise ValueError(f"onesided=1 with inverse={inverse} needs {need} ({input.shape[-1]}); or set onesided=0")
    samples = signal.shape[axis] if length is None else length
    if samples == 0 or (onesided and inverse and length is None and samples == 1):
        raise ValueError(f"a transform along axis {axis} of {input.shape}, dft_length={length}, has no samples")
    if onesided and inverse:
        return xp.fft.irfft(signal, length, axis)[..., None]
    whole = xp.fft.ifft if inverse else _mirrored if real else xp.fft.fft
    return to_parts((xp.fft.rfft if onesided else whole)(signal, length, axis))


@op("DFT", since=17, half="float32")
def dft_17(input, dft_length: Static = None, *, axis=1, inverse=0, onesided=0):
    """DFT-17, whose axis is an attribute."""
    return dft(input, dft_length, axis, inverse=inverse, onesided=onesided)


@op("STFT", since=17, half="float32", heavy=True, unsharded=True, wide=True)
def stft(signal, frame_step: Static, window=None, frame_length: Static = None, *, onesided=1):
    """The short-time Fourier transform: [batch, length, 1 or 2] -> [batch, frames, bins, 2]."""
    if signal.ndim == 2:  # real, as exported by PyTorch and accepted by onnxruntime
        signal = signal[..., None]
    check_shape("signal", signal, "batch", "length", "1 or 2")
    step, length = _count(frame_step), _count(frame_length)
    if length is None:
        length = signal.shape[1] if window is None else window.shape[0]
    check_shape("a window of one frame_length", window, length)
    if step < 1 or not 0 < length <= signal.shape[1]:
        raise ValueError(f"frame_step ({step}) or frame_length ({length}) is invalid for length {signal.shape[1]}")
    starts = np.arange(0, signal.shape[1] - length + 1, step)
    frames = signal[:, starts[:, None] + np.arange(length)]
    return dft(frames if window is None else frames * window[:, None], axis=2, onesided=onesided)


def _cosine_window(a0, a1, a2):
    def window(size: Static, *, output_datatype=1, periodic=1):
        n = _count(size)
        angle = 2 * np.pi * counting(n).astype(np.float64) / max(n if periodic else n - 1, 1)
        values = a0 - a1 * xp.cos(angle) + a2 * xp.cos(2 * angle)
        # The formula is 0/0 for a symmetric window of one point; 1, as in other implementations.
        values = values if periodic or n != 1 else np.ones(1)
        return values.astype(to_dtype(output_datatype, "output_datatype"))

    return window


op("HannWindow", since=17)(_cosine_window(0.5, 0.5, 0.0))
op("HammingWindow", since=17)(_cosine_window(25 / 46, 21 / 46, 0.0))
op("BlackmanWindow", since=17)(_cosine_window(0.42, 0.5, 0.08))


_EDGES = "band edges are spaced as in the runtimes, because ONNX does not specify it"


@op("MelWeightMatrix", since=17, unsharded=True, limits=_EDGES)
def mel_weight_matrix(
    num_mel_bins: Static, dft_length: Static, sample_rate, lower_edge_hertz, upper_edge_hertz, *, output_datatype=1
):
    """Triangular filters [bins, mels], evenly spaced on the mel scale, for a one-sided spectrum."""
    mels, length = _count(num_mel_bins), _count(dft_length)
    rate, low, high = (x.reshape(()).astype(np.float64) for x in (sample_rate, lower_edge_hertz, upper_edge_hertz))
    low, high = (2595 * xp.log10(1 + hertz / 700) for hertz in (low, high))
    # The specification does not define the spacing; the runtimes divide the range by the number of edges.
    mel = low + np.arange(mels + 2.0) * ((high - low) / (mels + 2))
    edges = (length + 1) * (700 * (10 ** (mel / 2595) - 1)) // rate
    if is_known(edges) and edges[-1] > length // 2 + 1:
        raise ValueError(f"upper_edge_hertz ({upper_edge_hertz}) exceeds the spectrum at sample rate {sample_rate}")
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    bins = np.arange(length // 2 + 1.0)[:, None]
    rising = (bins - left) / xp.where(centre > left, centre - left, 1)
    falling = (right - bins) / xp.where(right > centre, right - centre, 1)
    weights = xp.where(bins == centre, 1, xp.maximum(xp.minimum(rising, falling), 0))
    return weights.astype(to_dtype(output_datatype, "output_datatype"))

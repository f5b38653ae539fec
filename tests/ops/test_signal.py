"""Signal operators against numpy.fft and scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal

from tests.support.helpers import run_op

RNG = np.random.default_rng(0)


def traced(x):
    with jax.enable_x64(True):
        return jnp.asarray(x)


def as_complex(x):
    return x[..., 0] + 1j * x[..., 1] if x.shape[-1] == 2 else x[..., 0]


@pytest.mark.parametrize("asarray", [np.asarray, traced])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("length", [None, 3, 4, 6, 7, 9])
@pytest.mark.parametrize("inverse", [0, 1])
def test_dft_pads_and_truncates(asarray, parts, length, inverse):
    x = RNG.standard_normal((2, 6, 3, parts))
    got = run_op("DFT", asarray(x), length and np.array(length), np.array(1), inverse=inverse)
    want = (np.fft.ifft if inverse else np.fft.fft)(as_complex(x), length, 1)
    np.testing.assert_allclose(as_complex(np.asarray(got)), want, atol=1e-12)


@pytest.mark.parametrize("length", [None, 7, 8, 12])
def test_onesided_transforms_invert_each_other(length):
    x = RNG.standard_normal((2, 10, 1))
    half = run_op("DFT", x, np.array(10), None, onesided=1)
    assert half.shape == (2, 6, 2)
    back = run_op("DFT", half, length and np.array(length), None, onesided=1, inverse=1)
    np.testing.assert_allclose(back[..., 0], np.fft.irfft(as_complex(half), length, 1), atol=1e-12)


def test_the_default_axis_moved_with_opset_20():
    x = RNG.standard_normal((2, 3, 5, 1)).astype(np.float32)
    for opset, axis in ((17, 1), (19, 1), (20, 2)):
        want = np.fft.fft(x[..., 0], axis=axis)
        got = run_op("DFT", x, opset=opset)
        assert got.dtype == np.float32
        np.testing.assert_allclose(as_complex(got), want, atol=1e-5)
    np.testing.assert_allclose(
        as_complex(run_op("DFT", x, opset=17, axis=-2)), np.fft.fft(x[..., 0], axis=2), atol=1e-5
    )


@pytest.mark.parametrize(
    ("parts", "attributes", "message"),
    [
        (2, {"onesided": 1}, "set onesided=0"),
        (1, {"onesided": 1, "inverse": 1}, "needs a complex input"),
        (3, {}, "last extent must be"),
        (1, {"axis": np.array(-1)}, "choose a signal axis"),
    ],
)
def test_dft_rejects_invalid_operands(parts, attributes, message):
    with pytest.raises(ValueError, match=message):
        run_op("DFT", np.zeros((2, 4, parts), np.float32), **attributes)


@pytest.mark.parametrize("inverse", [0, 1])
def test_dft_needs_a_sample(inverse):
    one, none = (np.zeros((2, n, 1 + inverse), np.float32) for n in (1, 0))
    cases = [(none, None), (one, np.array(0)), *([(one, None)] if inverse else [])]  # of one bin, 2 * (1 - 1) samples
    for x, length in cases:
        for onesided in (0, 1) if x is none else (1,):
            with pytest.raises(ValueError, match="has no samples"):
                run_op("DFT", x, length, inverse=inverse, onesided=onesided)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_precision_transforms_in_float32(half):
    x = jnp.arange(8.0, dtype=half).reshape(1, 8, 1)
    got = run_op("DFT", x)
    assert got.dtype == half and got[0, 0, 0] == 28


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("asarray", [np.asarray, traced])
def test_stft_frames(onesided, asarray):
    signal, window = RNG.standard_normal((2, 21, 1)), RNG.standard_normal(8)
    got = run_op("STFT", asarray(signal), np.array(5), asarray(window), onesided=onesided)
    frames = np.stack([signal[:, i : i + 8, 0] * window for i in (0, 5, 10)], 1)
    want = (np.fft.rfft if onesided else np.fft.fft)(frames)
    np.testing.assert_allclose(as_complex(np.asarray(got)), want, atol=1e-12)


def test_stft_takes_a_signal_of_rank_2_as_real():
    signal, window = RNG.standard_normal((2, 21)), RNG.standard_normal(8)
    got = run_op("STFT", signal, np.array(5), window)
    np.testing.assert_array_equal(got, run_op("STFT", signal[..., None], np.array(5), window))


def test_stft_defaults_and_errors():
    signal = np.ones((1, 6, 1), np.float32)
    assert run_op("STFT", signal, np.array(2)).shape == (1, 1, 4, 2)  # the whole signal is the frame
    with pytest.raises(ValueError, match="frame_length"):
        run_op("STFT", signal, np.array(2), np.ones(3, np.float32), np.array(4))
    with pytest.raises(ValueError, match="is invalid for length"):
        run_op("STFT", signal, np.array(2), None, np.array(7))


@pytest.mark.parametrize("periodic", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 7, 16])
@pytest.mark.parametrize(
    ("name", "window"),
    [("HannWindow", "hann"), ("HammingWindow", ("general_hamming", 25 / 46)), ("BlackmanWindow", "blackman")],
)
def test_windows(name, window, size, periodic):
    got = run_op(name, np.array(size), periodic=periodic, output_datatype=11)
    want = scipy.signal.get_window(window, size, fftbins=bool(periodic))
    if size > 1:  # scipy calls every window of one point 1; a periodic one begins with its edge
        np.testing.assert_allclose(got, want, atol=1e-14)
    else:
        assert got.shape == (1,) and np.isfinite(got).all()
    assert run_op(name, np.array(size, np.int32)).dtype == np.float32


def test_mel_weights_of_traced_and_constant_operands_agree():
    counts = (np.array(8), np.array(64))
    hertz = (np.array(16000), np.array(100.0, np.float32), np.array(7000.0, np.float32))
    known = run_op("MelWeightMatrix", *counts, *hertz)
    traced = jax.jit(lambda *rest: run_op("MelWeightMatrix", *counts, *rest))(*hertz)
    np.testing.assert_allclose(known, traced, rtol=1e-6)
    assert known.shape == (33, 8) and known.dtype == np.float32 and (known.max(0) == 1).all()


def test_mel_weights_beyond_the_spectrum_are_rejected():
    with pytest.raises(ValueError, match="exceeds the spectrum"):
        run_op("MelWeightMatrix", np.array(4), np.array(64), np.array(8000), np.float32(0), np.float32(20000))

"""com.microsoft.AttnLSTM: onnxruntime is the judge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ops.test_microsoft import F32, I32, MICROSOFT, onnxruntime_says
from tests.support.helpers import check_gradients, run_op
from tests.support.joined import results_of

RNG = np.random.default_rng(4)
STEPS, BATCH, INPUT, HIDDEN, MEMORY, DEPTH, UNITS, STATE = 4, 3, 2, 5, 6, 3, 4, 7


def real(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) * 0.7).astype(F32)


def operands(directions: int = 1, left_out: str = "", **other: Any) -> list[Any]:
    """Those of a layer with all of its optional inputs, but for some."""
    d, out = directions, left_out.split()
    state = DEPTH if "AW" in out else STATE
    given = {
        "X": real(STEPS, BATCH, INPUT),
        "W": real(d, 4 * HIDDEN, INPUT + state),
        "R": real(d, 4 * HIDDEN, HIDDEN),
        "B": real(d, 8 * HIDDEN),
        "sequence_lens": I32([4, 1, 3]),
        "initial_h": real(d, BATCH, HIDDEN),
        "initial_c": real(d, BATCH, HIDDEN),
        "P": real(d, 3 * HIDDEN),
        "QW": real(d, HIDDEN, UNITS),
        "MW": real(d, DEPTH, UNITS),
        "V": real(d, UNITS),
        "M": real(BATCH, MEMORY, DEPTH),
        "memory_seq_lens": I32([2, 6, 1]),
        "AW": real(d, DEPTH + HIDDEN, STATE),
    } | other
    return [None if name in out else value for name, value in given.items()]


ALL: dict[str, Any] = {"hidden_size": HIDDEN}
OTHERS = ("HardSigmoid", "ScaledTanh", "Affine")
GIVEN = {"activation_alpha": (0.3, 0.7, 0.9), "activation_beta": (0.4, 1.2, 0.1)}

# operator, inputs, outputs, attributes; the first row is run in every type too
ROWS: list[tuple[str, list[Any], int, dict[str, Any]]] = [
    ("AttnLSTM", operands(), 3, ALL),
    ("AttnLSTM", operands(left_out="B sequence_lens initial_h initial_c P memory_seq_lens AW"), 3, ALL),
    ("AttnLSTM", operands(left_out="initial_h P AW"), 3, ALL | {"direction": "reverse"}),
    ("AttnLSTM", operands(2), 3, ALL | {"direction": "bidirectional"}),
    ("AttnLSTM", operands(left_out="memory_seq_lens"), 1, ALL | {"input_forget": 1}),
    ("AttnLSTM", operands(), 2, ALL | {"clip": 0.1}),
    ("AttnLSTM", operands(), 3, ALL | {"activations": OTHERS, **GIVEN}),
    (
        "AttnLSTM",
        operands(2, "sequence_lens"),
        3,
        ALL | {"activations": ("Sigmoid", "Softsign", "Softplus", *OTHERS), "direction": "bidirectional", **GIVEN},
    ),
]


DIFFERENTIABLE = ["AttnLSTM"]


def test_results_match_the_definition(subtests: pytest.Subtests) -> None:
    for case, (name, inputs, count, attributes), results in results_of(ROWS):
        with subtests.test(msg=case):
            for result, want in zip(results, onnxruntime_says(name, inputs, count, attributes), strict=True):
                np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-5)


def test_attention_ignores_entries_beyond_the_memory_length() -> None:
    inputs = operands()
    (first, *_), changed = (run_op("AttnLSTM", *inputs, domain=MICROSOFT, n_outputs=3, **ALL), list(inputs))
    changed[11] = np.where(np.arange(MEMORY)[:, None] < inputs[12][:, None, None], inputs[11], np.nan).astype(F32)
    again, *_ = run_op("AttnLSTM", *changed, domain=MICROSOFT, n_outputs=3, **ALL)
    np.testing.assert_array_equal(first, again)


def test_an_empty_memory_gives_a_context_of_zeros() -> None:
    inputs = operands(memory_seq_lens=I32([0, 6, 2]))
    same = [*inputs[:11], inputs[11].copy(), None, inputs[13]]
    same[11][0], same[11][2, 2:] = 0, 0
    y, z = (run_op("AttnLSTM", *each, domain=MICROSOFT, **ALL) for each in (inputs, same))
    np.testing.assert_allclose(y[:, :, 0], z[:, :, 0], rtol=1e-6)


def test_gradients() -> None:
    wide = [x.astype(np.float64) if x.dtype == F32 else x for x in operands()]
    free = {i: wide[i] for i in (0, 1, 2, 8, 9, 10, 11, 13)}
    check_gradients("AttnLSTM", wide, free, domain=MICROSOFT, n_outputs=3, **ALL)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"W": real(1, 4 * HIDDEN, INPUT)}, "W must have the shape .* 9"),
        ({"QW": real(1, HIDDEN + 1, UNITS)}, "QW must have the shape .*hidden=5"),
        ({"AW": real(1, DEPTH, STATE)}, "AW must have the shape .*depth_and_hidden=8"),
        ({"M": None}, "QW, MW, V and M .* must be given"),
        ({"memory_seq_lens": I32([1])}, "memory_seq_lens must have the shape .*batch=3"),
    ],
)
def test_unsupported_options_are_rejected(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_op("AttnLSTM", *operands(**changes), domain=MICROSOFT, **ALL)


def test_activations_missing_in_onnxruntime_are_rejected() -> None:
    with pytest.raises(ValueError, match="activation 'Softmax' is unknown"):
        run_op("AttnLSTM", *operands(), domain=MICROSOFT, activations=("Softmax", "Tanh", "Tanh"), **ALL)

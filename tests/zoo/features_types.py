"""Element types of torch, complex numbers as pairs, and random numbers."""

from __future__ import annotations

from typing import Any, Final

from .feature import F, Feature, b, cases, excused, f, i, nn, of, positive, torch
from .features_arithmetic import TRUNCATES
from .torch_exports import DYNAMO, EXPORTERS, SCRIPT


def _wrapping(x: Any, y: Any) -> Any:
    return x + y, x - y, x * y, 0 - x, x // 3, x.sum(0)


def _bits(x: Any, y: Any) -> Any:
    return x & y, x | y, x ^ y, ~x


def _mixed(x: Any) -> Any:
    """What a network computes, in whatever type its operand has."""
    return (
        torch.tanh(x @ x.transpose(1, 2)),
        F.softmax(x, -1),
        x.sum(0),
        x * 0.5 + 1,
        F.layer_norm(x, (5,)),
        x.exp().mean(1),
    )


IN_32_BITS: Final = "JAX's 32-bit mode takes the int64 arguments of a caller's jit as int32"

TYPES: Final = (
    *(
        Feature(f"{dtype} wraps around", of(_wrapping), lambda n, d=dtype: [_full(n, d), _full(n, d)])
        for dtype in ("uint8", "int16", "int32")
    ),
    Feature(
        "int8 wraps around",
        of(_wrapping),
        lambda n: [_full(n, "int8"), _full(n, "int8")],
        known=excused(TRUNCATES, "outputs", by=(SCRIPT,)),
    ),
    Feature(
        "int64 wraps around",
        of(_wrapping),
        lambda n: [_full(n, "int64"), _full(n, "int64")],
        known={e: {"outputs": "onnxruntime's ReduceSum does not wrap around", "jit": IN_32_BITS} for e in EXPORTERS},
    ),
    *(
        Feature(
            f"bitwise operators, {dtype}",
            of(_bits),
            lambda n, d=dtype: [_full(n, d), _full(n, d)],
            exporters=(DYNAMO,),
            known={} if dtype != "int64" else excused(IN_32_BITS, "jit"),
        )
        for dtype in ("int8", "uint8", "int32", "int64")
    ),
    Feature(
        "shifts of uint8",
        of(lambda x, k: (torch.bitwise_left_shift(x, k), torch.bitwise_right_shift(x, k))),
        lambda n: [_full(n, "uint8"), i(n, 7, high=8, dtype="uint8")],
        exporters=(DYNAMO,),
        known=excused("the exporter casts the results to int8", "outputs", by=(DYNAMO,)),
    ),
    Feature(
        "logical operators and comparisons",
        of(
            lambda x, y, m: (
                torch.logical_xor(x > 0, m),
                torch.logical_not(x),
                (x > y) & m | ~m,
                x.eq(y),
                x <= y,
                m ^ (x > 1),
                m.sum(1),
            )
        ),
        lambda n: [i(n, 6, high=3), i(n, 6, high=3), b(n, 6)],
    ),
    Feature(
        "casts of floats: toward zero",
        of(lambda x: tuple(x.to(getattr(torch, d)) for d in ("int8", "int32", "int64", "float16", "float64", "bool"))),
        lambda n: [f(n, 9) * 20],
    ),
    Feature(
        "casts of integers: wrap around",
        of(lambda x: tuple(x.to(getattr(torch, d)) for d in ("int8", "uint8", "int16", "int32", "float32", "bool"))),
        lambda n: [i(n, 9, low=-70000, high=70000)],
    ),
    Feature(
        "float16, bfloat16 and float64 of one operand",
        of(lambda x: tuple((x.to(d) * 3 + 1).sqrt().float() for d in (torch.float16, torch.bfloat16, torch.float64))),
        lambda n: [positive(n, 9)],
        tolerance=1e-2,
    ),
    Feature("a float64 network", of(_mixed), lambda n: [f(n, 4, 5, dtype="float64")]),
    Feature("a float16 network", of(_mixed), lambda n: [f(n, 4, 5, dtype="float16")], tolerance=2e-3),
    Feature(
        "a bfloat16 network", of(lambda x: _mixed(x.bfloat16())[0].float()), lambda n: [f(n, 4, 5)], tolerance=2e-2
    ),
    Feature("linear layer of float16", lambda: nn.Linear(5, 6).half(), lambda n: [f(n, 5, dtype="float16")]),
    Feature("linear layer of float64", lambda: nn.Linear(5, 6).double(), lambda n: [f(n, 5, dtype="float64")]),
    Feature(
        "types that meet: Python numbers, integers, booleans, zero-dimensional tensors",
        of(lambda x, j, m: (x + j, x * m, j + m, j / 2, j * 0.5, x + torch.tensor(2.0, dtype=torch.float64), x**j)),
        lambda n: [positive(n, 5), i(n, 5, high=4), b(n, 5)],
    ),
)


def _full(n: int, dtype: str) -> Any:
    """Every integer of the type is as likely."""
    info = torch.iinfo(getattr(torch, dtype))
    return torch.randint(info.min, info.max, (n, 7), dtype=getattr(torch, dtype))


COMPLEX: Final = (
    Feature(
        "view_as_complex, view_as_real",
        of(lambda x: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(x.flip(0)))),
        lambda n: [f(n, 5, 2)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "rotary embedding by complex numbers",
        of(lambda x, a: torch.view_as_real(torch.view_as_complex(x) * torch.polar(torch.ones_like(a), a)).flatten(2)),
        lambda n: [f(n, 4, 5, 2), f(4, 5)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "fft, ifft", of(lambda x: torch.fft.ifft(torch.fft.fft(x) * 2).real), lambda n: [f(n, 8)], exporters=(DYNAMO,)
    ),
    Feature(
        "rfft, irfft", of(lambda x: torch.fft.irfft(torch.fft.rfft(x), n=8)), lambda n: [f(n, 8)], exporters=(DYNAMO,)
    ),
    Feature(
        "rfft to pairs", of(lambda x: torch.view_as_real(torch.fft.rfft(x))), lambda n: [f(n, 9)], exporters=(DYNAMO,)
    ),
    Feature(
        "fft2, ifft2",
        of(lambda x: torch.fft.ifft2(torch.fft.fft2(x)).real),
        lambda n: [f(n, 6, 8)],
        exporters=(DYNAMO,),
    ),
    Feature("rfft2", of(lambda x: torch.fft.rfft2(x).abs()), lambda n: [f(n, 6, 8)], exporters=(DYNAMO,)),
    Feature(
        "stft",
        of(lambda x, w: torch.view_as_real(torch.stft(x, 16, 4, window=w, center=False, return_complex=True))),
        lambda n: [f(n, 64), torch.hann_window(16)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "stft, centred",
        of(lambda x, w: torch.view_as_real(torch.stft(x, 16, 4, window=w, return_complex=True))),
        lambda n: [f(n, 64), torch.hann_window(16)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "stft and istft",
        of(
            lambda x, w: torch.istft(
                torch.stft(x, 16, 4, window=w, return_complex=True) * torch.linspace(0, 1, 9)[:, None], 16, 4, window=w
            )
        ),
        lambda n: [f(n, 64), torch.hann_window(16)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "stft to pairs",
        of(lambda x, w: torch.stft(x, 16, 4, window=w, center=False, return_complex=False)),
        lambda n: [f(n, 64), torch.hann_window(16)],
        exporters=(SCRIPT,),
    ),
)

RANDOM: Final = (  # facts that hold of whatever is drawn, in the shape of what is drawn
    Feature(
        "rand, rand_like, uniform",
        of(lambda x: tuple((u >= 0) & (u < 1) for u in (torch.rand_like(x), torch.rand(x.shape[0], 2)))),
        lambda n: [f(n, 5)],
    ),
    Feature(
        "randn, randn_like",
        of(lambda x: tuple(z.abs() < 9 for z in (torch.randn_like(x), torch.randn(2, x.shape[0])))),
        lambda n: [f(n, 5)],
    ),
    Feature("bernoulli", of(lambda x: _is_binary(torch.bernoulli(x))), lambda n: [positive(n, 5) / 2]),
    Feature(
        "multinomial",
        of(lambda x: torch.multinomial(x, 4, replacement=True) // 5),
        lambda n: [positive(n, 5)],
    ),
    Feature("randint", of(lambda x: torch.randint(0, 9, (x.shape[0], 4)) // 9), lambda n: [f(n, 5)]),
    Feature("dropout in training", of(lambda x: _dropped(x)), lambda n: [positive(n, 5)]),
    Feature(
        "gumbel_softmax",
        of(lambda x: (F.gumbel_softmax(x, tau=0.5).sum(1) - 1).abs() < 1e-5),
        lambda n: [f(n, 6)],
        exporters=(DYNAMO,),
    ),
)


def _is_binary(x: Any) -> Any:
    return (x == 0) | (x == 1)


def _dropped(x: Any) -> Any:
    return _is_binary((F.dropout(x, 0.5, training=True) / (2 * x)).round(decimals=3))


TABLES: Final = {
    "torch: types": TYPES,
    "torch: complex numbers": COMPLEX,
    "torch: random numbers": RANDOM,
}
CASES: Final = cases(TABLES)
REFUSED: Final = {
    f"bitwise operators on integers / {SCRIPT}": "ONNX export does NOT support exporting bitwise OR for non-boolean",
    f"complex numbers, fft, istft / {SCRIPT}": "aten::view_as_complex, aten::fft_fft are not supported",
    f"gumbel_softmax / {SCRIPT}": "aten::exponential is not supported",
}
"""What has no line: what an exporter refuses to write, or writes as the specification forbids."""

"""Structures of torch: control flow, what modules return and keep; and features at other opsets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from .feature import Feature, cases, each, excused, f, i, nn, of, using
from .features_arithmetic import PRODUCTS
from .features_indexing import TABLES as INDEXING
from .features_layers import TABLES as LAYERS
from .features_resampling import TABLES as RESAMPLING
from .features_sequences import TABLES as SEQUENCES
from .torch_exports import DYNAMO, SCRIPT


def _if() -> Any:
    import torch

    class If(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(5))

        def forward(self, x: torch.Tensor):
            if bool(x.sum() > 0):
                y = x * self.weight
                if x.shape[0] > 3:
                    y = y + 1
            else:
                y = torch.tanh(x)
            return y, x.mean(1)

    return torch.jit.script(If())


def _loop() -> Any:
    import torch

    class Loop(torch.nn.Module):
        def forward(self, x: torch.Tensor):
            total = torch.zeros_like(x[0])
            for k in range(x.shape[0]):
                total = torch.tanh(total + x[k]) * 0.9
            return total

    return torch.jit.script(Loop())


def _while() -> Any:
    import torch

    class While(torch.nn.Module):
        def forward(self, x: torch.Tensor):
            count = torch.zeros([], dtype=torch.int64)
            while bool(x.abs().max() > 0.5):
                x = x * 0.7
                count = count + 1
            return x, count

    return torch.jit.script(While())


def _list() -> Any:
    import torch

    class Collect(torch.nn.Module):
        def forward(self, x: torch.Tensor):
            rows = []
            for k in range(x.shape[0]):
                rows.append(x[k] * k)
            return torch.stack(rows), torch.cat(rows)

    return torch.jit.script(Collect())


def _cond() -> Any:
    import torch

    class Cond(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(5, 5)

        def forward(self, x: torch.Tensor):
            return torch.cond(x.sum() > 0, lambda x: self.layer(x), lambda x: torch.sin(x), (x,))

    return Cond()


def _while_loop() -> Any:
    import torch
    from torch._higher_order_ops.while_loop import while_loop

    class WhileLoop(torch.nn.Module):
        def forward(self, x: torch.Tensor, k: torch.Tensor):
            return while_loop(lambda _, k: k < 5, lambda x, k: (x * 0.9 + 0.1, k + 1), (x, k))

    return WhileLoop()


def _scan() -> Any:
    import torch
    from torch._higher_order_ops.scan import scan

    class Scan(torch.nn.Module):
        def forward(self, state: torch.Tensor, x: torch.Tensor):
            return scan(lambda s, x: (torch.tanh(s + x), s * x), state, x, dim=0)

    return Scan()


BY_DATA: Final = "JAX cannot differentiate a loop in reverse whose number of trips depends on data"

CONTROL: Final = (
    Feature("if, nested", _if, lambda n: [f(n, 5)], exporters=(SCRIPT,)),
    Feature("for over a dynamic length", _loop, lambda n: [f(n, 5)], exporters=(SCRIPT,)),
    Feature(
        "while the data say so",
        _while,
        lambda n: [f(n, 5)],
        exporters=(SCRIPT,),
        known=excused(BY_DATA, "grad"),
    ),
    Feature("a list that grows in a loop", _list, lambda n: [f(n, 5)], exporters=(SCRIPT,)),
    Feature("torch.cond", _cond, lambda n: [f(n, 5)], exporters=(DYNAMO,)),
    Feature(
        "while_loop",
        _while_loop,
        lambda n: [f(n, 5), i()],
        exporters=(DYNAMO,),
        known=excused(BY_DATA, "grad"),
    ),
    Feature("scan", _scan, lambda n: [f(5), f(n, 5)], exporters=(DYNAMO,)),
)


def _buffers() -> Any:
    import torch

    class Buffers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(10, 5))
            self.register_buffer("count", torch.tensor(3))
            self.scale = torch.nn.Parameter(torch.randn(5))

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.table[: x.shape[0]], self.scale, self.table, self.count, x * self.scale

    return Buffers()


VALUES: Final = (
    Feature(
        "maps and tuples of outputs",
        of(lambda x: {"first": x + 1, "second": (x * 2, [x.sum(), x.mean(0)])}),
        lambda n: [f(n, 5)],
    ),
    Feature("outputs that are inputs", of(lambda x, y: (x, y, x, x + y)), lambda n: [f(n, 5), f(n, 5)]),
    Feature("outputs that are weights and buffers", _buffers, lambda n: [f(n, 5)]),
    Feature(
        "empty tensors",
        of(lambda x: (x[:0], x[:, 5:], x[:0].sum(), x[:, :0].sum(1))),
        lambda n: [f(n, 5)],
    ),
    Feature("scalars", of(lambda x, k: (x * 2, x.reshape(1), k + 1, x + k)), lambda _: [f(), i()], fixed=True),
    Feature(
        "one layer used twice",
        using(lambda: [nn.Linear(5, 5), nn.Tanh()], lambda all, x: all[0](all[1](all[0](x)))),
        lambda n: [f(n, 5)],
    ),
    Feature("Identity, Flatten", each(lambda: nn.Identity(), lambda: nn.Flatten()), lambda n: [f(n, 5, 2)]),
)

OLDER: Final = (
    "LSTM with states",
    "GRU, bidirectional, 2 layers",
    "Conv2d: stride, dilation, groups, padding modes",
    "AvgPool: ceil_mode, count_include_pad",
    "LayerNorm",
    "Softmax, Softmin, LogSoftmax, Softmax2d, logsumexp",
    "gather, take",
)
OLD: Final = (
    "GELU, SiLU, Mish, Softplus, ELU, CELU, SELU",
    "topk",
    "roll, flip",
    "indexing by tensors, slices, None, ellipsis, negative numbers",
    "tensor_split, chunk, split, unbind, stack, cat",
    "interpolate, nearest",
    "matmul, with broadcasting and of vectors",
)
NEWER: Final = (
    "scaled_dot_product_attention",
    "scaled_dot_product_attention, causal",
    "scaled_dot_product_attention, masks of bool and float",
    "scaled_dot_product_attention, grouped queries",
    "RMSNorm",
    "GroupNorm",
    "GELU, SiLU, Mish, Softplus, ELU, CELU, SELU",
    "interpolate, bilinear",
)
_TABLES: Final = (*SEQUENCES.values(), *LAYERS.values(), *INDEXING.values(), *RESAMPLING.values(), PRODUCTS)
_ROWS: Final = {row.name: row for table in _TABLES for row in table}
OPSETS: Final = tuple(
    replace(_ROWS[name], opset=opset, exporters=(exporter,))
    for names, exporter, opsets in ((OLDER, SCRIPT, (9, 11, 13)), (OLD, SCRIPT, (13,)), (NEWER, DYNAMO, (18, 23)))
    for name in names
    for opset in opsets
)

TABLES: Final = (*SEQUENCES.values(), *LAYERS.values(), *INDEXING.values(), *RESAMPLING.values(), PRODUCTS)
_ROWS: Final = {row.name: row for table in _TABLES for row in table}
OPSETS: Final = tuple(
    replace(_ROWS[name], opset=opset, exporters=(exporter,))
    for names, exporter, opsets in ((OLDER, SCRIPT, (9, 11, 13)), (NEWER, DYNAMO, (18, 23)))
    for name in names
    for opset in opsets
)

TABLES: Final = {
    "torch: control flow": CONTROL,
    "torch: values": VALUES,
    "torch: opsets": OPSETS,
}
CASES: Final = cases(TABLES)
REFUSED: Final = {
    f"interpolate, nearest, opset 9 / {SCRIPT}": "TypeError: 'NoneType' object is not subscriptable",
    f"slices with steps, opset 9 / {SCRIPT}": "step!=1 is currently not supported",
    f"tensor_split, outer, opsets 9 and 11 / {SCRIPT}": "supported from opset 12 or 13 on",
    f"topk of the smallest, opset 9 / {SCRIPT}": "Ascending TopK is not supported",
}
"""What has no line: what an exporter refuses to write, or writes as the specification forbids."""

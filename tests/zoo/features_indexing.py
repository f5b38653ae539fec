"""Functions of torch that select, write and arrange elements."""

from __future__ import annotations

from typing import Any, Final

from .feature import F, Feature, b, cases, excused, f, i, of, ramp, torch
from .torch_exports import DYNAMO, SCRIPT

BY_DATA: Final = "the shape of an output depends on the data"


def _reduced(*kinds: str, include_self: bool = True) -> Any:
    """scatter_reduce of each kind."""
    return of(lambda x, j, y: tuple(x.scatter_reduce(1, j, y, k, include_self=include_self) for k in kinds))


INDEXING: Final = (
    Feature(
        "scatter, scatter_add",
        of(lambda x, j, y: (x.scatter(1, j, 2.5), x.scatter_add(0, j, y), x.scatter(0, torch.argsort(y, 0), y))),
        lambda n: [f(5, n), i(5, n, high=3), f(5, n)],
    ),
    Feature(
        "scatter_reduce: sum, prod, amin, amax",
        _reduced("sum", "prod", "amin", "amax"),
        lambda n: [f(n, 5), i(n, 5, high=5), f(n, 5)],
    ),
    Feature(
        "scatter_reduce: mean",
        _reduced("mean"),
        lambda n: [f(n, 5), i(n, 5, high=5), f(n, 5)],
        exporters=(DYNAMO,),
        known=excused("the exporter writes ScatterElements without the mean", "outputs", "grad", by=(DYNAMO,)),
    ),
    Feature(
        "scatter_reduce without self",
        _reduced("sum", "prod", "amin", "amax", include_self=False),
        lambda n: [f(n, 5), i(n, 5, high=5), f(n, 5)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "index_put",
        of(
            lambda x, j, k, y: (
                x.index_put((j, k), y),
                x.index_put((j,), torch.zeros(())),
                x.clone().index_put_((x > 1,), torch.tensor(-1.0)),
            )
        ),
        lambda n: [f(5, n), torch.tensor([3, 0, 4, 1]), i(4, high=3), f(4)],
    ),
    Feature(
        "index_put: accumulate",
        of(lambda x, j, k, y: x.index_put((j, k), y, accumulate=True)),
        lambda n: [f(5, n), torch.tensor([3, 0, 3, 1]), torch.tensor([2, 0, 2, 1]), f(4)],
        known=excused("the exporter drops accumulate=True", "outputs", "grad", by=(SCRIPT,)),
    ),
    Feature(
        "index_copy, index_fill, index_select",
        of(
            lambda x, j, y: (
                x.index_copy(0, torch.tensor([2, 0, 4]), y[:3]),
                x.index_fill(1, torch.tensor([1, 2]), 0.25),
                x.index_select(0, j),
            )
        ),
        lambda n: [f(5, 2 * n), i(4, high=5), f(4, 2 * n)],
    ),
    Feature(
        "index_add",
        of(lambda x, j, y: x.index_add(0, j, y)),
        lambda n: [f(5, 2 * n), torch.tensor([3, 0, 3, 1]), f(4, 2 * n)],
        known=excused("the exporter writes ScatterElements that does not add", "outputs", "grad", by=(SCRIPT,)),
    ),
    Feature(
        "index_add: alpha",
        of(lambda x, j, y: x.index_add(0, j, y, alpha=2)),
        lambda n: [f(5, 2 * n), torch.tensor([3, 0, 3, 1]), f(4, 2 * n)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "indexing by tensors, slices, None, ellipsis, negative numbers",
        of(lambda x, j: (x[j, :, j], x[:, j], x[..., None, -1], x[1:-1:2, ..., -3:], x[j[:, None], j], x[-1, 1])),
        lambda n: [f(5, 5, n + 3), i(4, high=5)],
    ),
    Feature(
        "indexing by tensors of negative numbers",
        of(lambda x, j: (x[j, :, j], x[:, j])),
        lambda n: [f(5, 5, n + 3), i(4, low=-5, high=0)],
        known=excused("the exporter takes several indices for positive", "outputs", "grad", by=(SCRIPT,)),
    ),
    Feature(
        "assignment to a slice",
        of(lambda x, y: _assigned(x.clone(), y)),
        lambda n: [f(n, 5, 6), f(n, 2, 6)],
    ),
    Feature(
        "masked_fill, where, clamp by tensors",
        of(
            lambda x, m, y: (
                x.masked_fill(m, -1e9),
                torch.where(m, x, y),
                torch.where(m, x, 0.0),
                torch.clamp(x, y, y + 1),
            )
        ),
        lambda n: [f(n, 5), b(n, 5), f(n, 5)],
    ),
    Feature("masked_scatter", of(lambda x, m, y: x.masked_scatter(m, y)), lambda n: [f(n, 5), b(n, 5), f(n, 5)]),
    Feature("masked_select", of(lambda x, m: x.masked_select(m)), lambda n: [f(n, 5), b(n, 5)], exporters=(SCRIPT,)),
    Feature("nonzero", of(lambda x: x.nonzero()), lambda n: [i(n, 5, high=3)]),
    Feature("argwhere", of(lambda x: torch.argwhere(x > 1)), lambda n: [i(n, 5, high=3)], exporters=(DYNAMO,)),
    Feature(
        "gather, take",
        of(lambda x, j: (x.gather(1, j), torch.take(x, j))),
        lambda n: [f(n, 5), i(n, 4, high=5)],
    ),
    Feature(
        "take_along_dim",
        of(lambda x, j: torch.take_along_dim(x, j, 1)),
        lambda n: [f(n, 5), i(n, 1, high=5)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "unique",
        of(lambda x: torch.unique(x, return_inverse=True, return_counts=True)),
        lambda n: [i(4 * n, high=5)],
        known=excused(BY_DATA, "jit"),
    ),
    Feature(
        "bincount",
        of(lambda x: torch.bincount(x, minlength=7)),
        lambda n: [i(4 * n, high=7)],
        exporters=(DYNAMO,),
        known=excused(BY_DATA, "jit"),
    ),
    Feature(
        "bucketize",
        of(lambda x, edges: (torch.bucketize(x, edges), torch.bucketize(x, edges, right=True))),
        lambda n: [i(n, 6, low=-2, high=8, dtype="float32"), torch.arange(5.0)],
    ),
    Feature("histc", of(lambda x: torch.histc(x, 5, -2, 2)), lambda n: [f(6 * n)], exporters=(DYNAMO,)),
    Feature(
        "sort, argsort",
        of(lambda x: (*torch.sort(x, 1), *torch.sort(x, 0, descending=True), torch.argsort(x, -1, descending=True))),
        lambda n: [ramp(n, 7)],
    ),
    Feature("topk", of(lambda x: (*torch.topk(x, 3), *torch.topk(x, 2, 0, largest=False))), lambda n: [ramp(n, 7)]),
    Feature(
        "maxima with indices, argmax",
        of(lambda x: (*x.max(1), *x.min(0), x.max(), x.argmax(1), x.argmin(), x.amax((0, 1)), torch.maximum(x, -x))),
        lambda n: [ramp(n, 7)],
    ),
    Feature("repeat_interleave", of(lambda x: (x.repeat_interleave(2, 1), x.repeat(2, 1, 3))), lambda n: [f(n, 5)]),
    Feature(
        "repeat_interleave by a tensor",
        of(lambda x, counts: torch.repeat_interleave(x, counts, 0)),
        lambda n: [f(n, 5), torch.tensor([2, 0, 3, 1][:n])],
        known=excused(BY_DATA, "jit"),
    ),
    Feature("one_hot", of(lambda x: F.one_hot(x, 6)), lambda n: [i(n, 5, high=6)]),
    Feature(
        "embedding, embedding_bag",
        of(
            lambda x, w: (
                F.embedding(x, w, padding_idx=2),
                F.embedding_bag(x, w, mode="sum"),
                F.embedding_bag(x, w, mode="mean"),
            )
        ),
        lambda n: [i(n, 4), f(10, 6)],
    ),
    Feature(
        "embedding_bag: offsets, weights",
        of(
            lambda x, w, o, s: (
                F.embedding_bag(x, w, o, mode="max"),
                F.embedding_bag(x, w, o, mode="sum", per_sample_weights=s),
            )
        ),
        lambda _: [i(9), f(10, 6), torch.tensor([0, 3, 4]), f(9)],
        fixed=True,
        known=excused("the exporter slices by the values of the offsets", "jit"),
    ),
)


def _assigned(x: Any, y: Any) -> Any:
    x[:, 1:3] = y
    x[..., -1] = 0.5
    x[:, 0, ::2] *= 2
    return x


SHAPES: Final = (
    Feature("cumsum", of(lambda x: (x.cumsum(0), torch.cumsum(x.round().long(), 1))), lambda n: [f(n, 5)]),
    Feature("logcumsumexp", of(lambda x: torch.logcumsumexp(x, 1)), lambda n: [f(n, 5)], exporters=(DYNAMO,)),
    Feature(
        "tril, triu, diagonal",
        of(
            lambda x: (
                torch.tril(x),
                torch.triu(x, 1),
                torch.tril(x, -2),
                torch.diagonal(x, 1, 1, 2),
                torch.triu(torch.ones(x.shape[1], x.shape[1]), -1),
            )
        ),
        lambda n: [f(2, n + 2, 6)],
    ),
    Feature(
        "diag_embed, trace",
        of(lambda x, y: (torch.diag_embed(x), torch.trace(y))),
        lambda n: [f(n, 3), f(4, 4)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "roll, flip",
        of(lambda x: (x.roll(2, 1), x.roll((1, -2), (0, 2)), x.flip(0, 2))),
        lambda n: [f(n, 5, 6)],
    ),
    Feature("rot90", of(lambda x: torch.rot90(x, 1, (1, 2))), lambda n: [f(n, 5, 6)], exporters=(DYNAMO,)),
    Feature("as_strided", of(lambda x: x.as_strided((2, 3), (4, 1), 1)), lambda n: [f(n, 5)], fixed=True),
    Feature(
        "unflatten, flatten, view, movedim, squeeze",
        of(
            lambda x: (
                x.unflatten(1, (2, -1)),
                x.flatten(1),
                x.view(x.shape[0], -1, 3),
                x.movedim(2, 0),
                x[:, :1].squeeze(1),
                x.unsqueeze(-1).transpose(0, 3),
            )
        ),
        lambda n: [f(n, 6, 4)],
    ),
    Feature(
        "tensor_split, chunk, split, unbind, stack, cat",
        of(
            lambda x: (
                *torch.tensor_split(x, 3, 1),
                *x.chunk(2, 1),
                *x.split((1, 4, 2), 1),
                torch.stack(x.unbind(2), 1),
                torch.cat((x, x.flip(0)), -1),
            )
        ),
        lambda n: [f(n, 7, 3)],
    ),
    Feature(
        "meshgrid, cartesian product",
        of(lambda x, y: (*torch.meshgrid(x, y, indexing="ij"), *torch.meshgrid(x, y, indexing="xy"))),
        lambda n: [f(n), f(5)],
    ),
    Feature(
        "arange, linspace, full, eye by dynamic lengths",
        of(
            lambda x: (
                torch.arange(x.shape[0]),
                torch.arange(1, x.shape[0], 0.5),
                torch.full((x.shape[0], 2), 1.5),
                x.new_zeros(x.shape[1], x.shape[0]),
                torch.ones_like(x, dtype=torch.int32),
            )
        ),
        lambda n: [f(n, 5)],
    ),
    Feature(
        "linspace",
        of(lambda x: torch.linspace(-1, 1, x.shape[0])[:, None] * x),
        lambda n: [f(n, 5)],
        exporters=(SCRIPT,),
    ),
    Feature(
        "a batch of none",
        of(lambda x: (x @ x.transpose(1, 2), F.softmax(x, -1), x.sum(0), torch.cat((x, x)), x.mean(1))),
        lambda n: [f((4 - n) * 2, 2, 5)],
    ),
)

TABLES: Final = {
    "torch: indexing": INDEXING,
    "torch: shapes": SHAPES,
}
CASES: Final = cases(TABLES)
REFUSED: Final = {
    f"argwhere, diag_embed, histc, logcumsumexp, rot90, take_along_dim, index_add by alpha / {SCRIPT}": "not supported",
    f"bincount / {SCRIPT}": "aten::bincount is not supported",
    f"cummax, cumprod, kthvalue, median, searchsorted / {DYNAMO}": "No ONNX function found",
    f"cummax, cumprod, kthvalue, median, searchsorted / {SCRIPT}": "not supported",
    f"linspace of a dynamic length / {DYNAMO}": "bakes in the first length",
    f"masked_select / {DYNAMO}": "No ONNX function found for aten.masked_select",
    f"scatter_reduce: mean, include_self=False / {SCRIPT}": "ONNX does not support them for scatter_reduce",
}
"""What has no line: what an exporter refuses to write, or writes as the specification forbids."""

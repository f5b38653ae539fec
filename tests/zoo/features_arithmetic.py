"""Arithmetic of torch: products, reductions, functions of elements."""

from __future__ import annotations

from typing import Final

from .feature import F, Feature, b, cases, excused, f, i, of, positive, torch
from .torch_exports import DYNAMO, SCRIPT

PRODUCTS: Final = (
    Feature(
        "einsum of two",
        of(
            lambda x, y, w: (
                torch.einsum("bij,bjk->bik", x, y),
                torch.einsum("bij,bik->bjk", x, x),
                torch.einsum("bij,kj->bik", x, w),
                torch.einsum("...ij,...jk->...ik", x, y),
                torch.einsum("bij,bjk->", x, y),
                torch.einsum("bij,cjk->bcik", x, y),
                torch.einsum("bij,bij->bij", x, x),
            )
        ),
        lambda n: [f(n, 4, 5), f(n, 5, 4), f(6, 5)],
    ),
    Feature(
        "einsum of one and of three",
        of(
            lambda x, y, w: (
                torch.einsum("bij->b", x),
                torch.einsum("bij->bji", x),
                torch.einsum("bii->bi", x),
                torch.einsum("bij,bjk,lk->bil", x, y, w),
                torch.einsum("ij,kl->ijkl", w, w),
            )
        ),
        lambda n: [f(n, 4, 4), f(n, 4, 5), f(3, 5)],
    ),
    Feature(
        "matmul, with broadcasting and of vectors",
        of(
            lambda x, y, v, w: (
                x @ y,
                x @ y[0, 0],
                v @ y,
                x @ w,
                torch.mv(x[0, 0], w),
                torch.dot(v, v),
                torch.outer(v, w),
            )
        ),
        lambda n: [f(n, 1, 3, 4), f(2, 4, 5)[None], f(4), f(4)],
    ),
    Feature(
        "bmm, baddbmm, addmm",
        of(
            lambda x, y, z: (
                torch.bmm(x, y),
                torch.baddbmm(z, x, y, beta=0.5, alpha=2),
                torch.addmm(z[0], x[0], y[0], beta=2, alpha=0.5),
            )
        ),
        lambda n: [f(n, 3, 4), f(n, 4, 5), f(n, 3, 5)],
    ),
    Feature(
        "addmv",
        of(lambda x, y, z: torch.addmv(z, y, x, beta=0.5)),
        lambda n: [f(4), f(n, 4), f(n)],
        exporters=(DYNAMO,),
    ),
    Feature("cdist", of(lambda x, y: torch.cdist(x, y)), lambda n: [f(n, 5), f(4, 5)], exporters=(SCRIPT,)),
    Feature(
        "normalize, cosine_similarity, pairwise_distance, norms",
        of(
            lambda x, y: (
                F.normalize(x, dim=1),
                F.normalize(x, p=1.0, dim=0),
                F.cosine_similarity(x, y, dim=1),
                F.pairwise_distance(x, y),
                torch.linalg.vector_norm(x, 3, dim=1),
                torch.linalg.norm(x, dim=0),
                x.norm(),
            )
        ),
        lambda n: [f(n, 5), f(n, 5)],
    ),
    Feature(
        "mean, var, std, prod, any, all",
        of(
            lambda x: (
                x.mean(1),
                x.var(1),
                x.std((0, 2), correction=0),
                *torch.var_mean(x, 2),
                x.prod(1),
                (x > 1).any(2),
                (x > -1).all(0),
                x.amax((1, 2)),
            )
        ),
        lambda n: [f(n, 4, 5)],
    ),
    Feature("count_nonzero", of(lambda x: torch.count_nonzero(x, 1)), lambda n: [i(n, 5)], exporters=(DYNAMO,)),
    Feature("det", of(lambda x: torch.det(x)), lambda n: [f(n, 3, 3) + 3 * torch.eye(3)]),
)

TRUNCATES: Final = "the exporter writes a floor_divide that truncates"

ARITHMETIC: Final = (
    Feature(
        "remainder, fmod, floor_divide of negative numbers",
        of(
            lambda x, y: (
                torch.remainder(x, y),
                torch.fmod(x, y),
                torch.floor_divide(x.detach(), y.detach()),
                torch.div(x, y, rounding_mode="trunc"),
            )
        ),
        lambda n: [f(n, 8) * 5, f(n, 8)],
        known=excused(TRUNCATES, "outputs", by=(SCRIPT,)),
    ),
    Feature(
        "remainder, fmod, floor_divide of negative integers",
        of(
            lambda j, k: (
                torch.remainder(j, k),
                torch.fmod(j, k),
                torch.floor_divide(j, k),
                torch.div(j, k, rounding_mode="trunc"),
                torch.true_divide(j, k),
            )
        ),
        lambda n: [i(n, 8, low=-9), i(n, 8, low=1, high=5) * (2 * b(n, 8).long() - 1)],
        known=excused(TRUNCATES, "outputs", by=(SCRIPT,)),
    ),
    Feature(
        "round half to even, ceil, floor, sign",
        of(lambda x: (x.round(), x.ceil(), x.floor(), x.sign())),
        lambda n: [i(n, 9, low=-9) / 2],
    ),
    Feature(
        "trunc, frac, round to decimals",
        of(lambda x: (torch.trunc(x), torch.frac(x), torch.round(x, decimals=2))),
        lambda n: [f(n, 9)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "elementwise functions",
        of(
            lambda x: (
                torch.erf(x),
                torch.log1p(x.abs()),
                torch.rsqrt(x.abs() + 1),
                torch.reciprocal(x + 5),
                torch.square(x),
                torch.atan(x),
                torch.sin(x),
                torch.tan(x / 4),
                torch.log2(x.abs() + 1),
                torch.pow(x.abs() + 0.1, 1.7),
                torch.pow(2.0, x),
            )
        ),
        lambda n: [f(n, 9)],
    ),
    Feature(
        "more elementwise functions",
        of(
            lambda x, p: (
                torch.expm1(x),
                torch.exp2(x),
                torch.sinh(x),
                torch.cosh(x),
                torch.asinh(x),
                torch.atan2(x, p),
                torch.logaddexp(x, p),
                torch.logit(p / 2),
                torch.xlogy(p, p),
            )
        ),
        lambda n: [f(n, 9), positive(n, 9)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "lerp, addcmul, clamp, isnan, isinf",
        of(
            lambda x, y: (
                torch.lerp(x, y, 0.3),
                torch.addcmul(x, x, y, value=0.5),
                x.clamp(-0.5, 0.7),
                x.clamp(max=0.1),
                torch.isnan(x / 0 * 0),
                torch.isinf(x / 0),
            )
        ),
        lambda n: [f(n, 9), f(n, 9)],
    ),
)


TABLES: Final = {
    "torch: products": PRODUCTS,
    "torch: arithmetic": ARITHMETIC,
}
CASES: Final = cases(TABLES)
REFUSED: Final = {
    f"addmv, atan2, cosh, count_nonzero, expm1, exp2, frac, logit, sinh, trunc, xlogy / {SCRIPT}": "not supported",
    f"cdist / {DYNAMO}": "No ONNX function found for aten._cdist_forward",
    f"digamma, erfinv, hypot, lgamma / {DYNAMO}": "No ONNX function found",
    f"digamma, erfinv, hypot, lgamma / {SCRIPT}": "not supported",
    f"inverse / {DYNAMO}": "No ONNX function found for aten.linalg_inv_ex",
    f"inverse / {SCRIPT}": "aten::linalg_inv is not supported",
}
"""What has no line: what an exporter refuses to write, or writes as the specification forbids."""

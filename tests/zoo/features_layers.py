"""Layers of torch: convolutions, pools, normalisations, activations, losses."""

from __future__ import annotations

from typing import Any, Final

from .feature import F, Feature, cases, each, excused, f, i, nn, of, positive, ramp, torch, using
from .torch_exports import DYNAMO, SCRIPT

CONVOLUTIONS: Final = (
    Feature(
        "Conv1d: stride, dilation, groups, padding by name",
        each(
            lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1),
            lambda: nn.Conv1d(4, 8, 4, dilation=2, groups=2, padding="same"),
            lambda: nn.Conv1d(4, 4, 3, groups=4, bias=False, padding=1, padding_mode="circular"),
        ),
        lambda n: [f(n, 4, 3 * n + 4)],
    ),
    Feature(
        "Conv2d: stride, dilation, groups, padding modes",
        each(
            lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0)),
            lambda: nn.Conv2d(4, 8, 3, dilation=2, groups=4, padding="valid"),
            lambda: nn.Conv2d(4, 4, 5, padding=2, padding_mode="reflect"),
            lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate"),
        ),
        lambda n: [f(n, 4, 8, n + 5)],
    ),
    Feature(
        "Conv3d",
        each(lambda: nn.Conv3d(2, 4, 3, padding=1), lambda: nn.Conv3d(2, 2, (1, 3, 2), stride=(1, 2, 2), groups=2)),
        lambda n: [f(n, 2, 5, 6, 7)],
    ),
    Feature("Conv2d without a batch", lambda: nn.Conv2d(4, 6, 3), lambda n: [f(4, 6, 4 + n)]),
    Feature(
        "ConvTranspose1d, ConvTranspose2d, ConvTranspose3d",
        using(
            lambda: [
                nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1),
                nn.ConvTranspose2d(4, 6, 3, stride=(2, 3), groups=2, output_padding=(0, 2), dilation=2),
                nn.ConvTranspose3d(4, 4, 2, stride=2, groups=4, bias=False),
            ],
            lambda layers, x, y, z: (layers[0](x), layers[1](y), layers[2](z)),
        ),
        lambda n: [f(n, 4, 5 + n), f(n, 4, 5, 6), f(n, 4, 3, 3, 4)],
    ),
    Feature(
        "convolution with a kernel that is an operand",
        of(lambda x, w: F.conv2d(x, w, padding=1)),
        lambda n: [f(n, 3, 6, 6), f(4, 3, 3, 3)],
    ),
    Feature(
        "weight_norm",
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
        lambda n: [f(n, 6)],
    ),
    Feature(
        "spectral_norm",
        lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)),
        lambda n: [f(n, 6)],
        exporters=(DYNAMO,),
    ),
    Feature("Bilinear", lambda: nn.Bilinear(4, 5, 3), lambda n: [f(n, 4), f(n, 5)], exporters=(DYNAMO,)),
)


def _deformed() -> Any:
    from .vision_operators import torchvision

    convolve = torchvision().ops.deform_conv2d  # before anything is traced

    def call(x: Any, offset: Any, w: Any, bias: Any, *mask: Any) -> Any:
        return convolve(x, offset, w, bias, stride=(2, 1), padding=1, mask=mask[0] if mask else None)

    return of(call)()


DEFORMED: Final = (
    Feature(
        "deform_conv2d, with a mask, 2 groups of offsets",
        _deformed,
        lambda n: [f(n, 4, 6, 7), f(n, 36, 3, 7), f(6, 4, 3, 3), f(6), positive(n, 18, 3, 7)],
        exporters=(DYNAMO,),
        needs=("torch", "onnxscript", "torchvision"),
    ),
    Feature(
        "deform_conv2d",
        _deformed,
        lambda n: [f(n, 4, 6, 7), f(n, 18, 3, 7) * 2, f(6, 4, 3, 3), f(6)],
        exporters=(DYNAMO,),
        needs=("torch", "onnxscript", "torchvision"),
    ),
)

POOLS: Final = (
    Feature(
        "MaxPool: dilation, ceil_mode, padding",
        each(
            lambda: nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
            lambda: nn.MaxPool2d((2, 3), stride=1, dilation=(2, 1)),
            lambda: nn.MaxPool2d(3, stride=2, dilation=2, padding=1, ceil_mode=True),
        ),
        lambda n: [ramp(n, 2, 9, 10)],
    ),
    Feature(
        "MaxPool1d, MaxPool3d",
        using(lambda: [nn.MaxPool1d(3, 2), nn.MaxPool3d(2)], lambda layers, x, y: (layers[0](x), layers[1](y))),
        lambda n: [ramp(n, 2, 9), ramp(n, 2, 4, 5, 6)],
    ),
    Feature("MaxPool with indices", lambda: nn.MaxPool2d(2, return_indices=True), lambda n: [ramp(n, 2, 6, 8)]),
    Feature(
        "MaxPool and MaxUnpool",
        using(
            lambda: [nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)],
            lambda layers, x: layers[1](*layers[0](x)),
        ),
        lambda n: [ramp(n, 2, 6, 8)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "AvgPool: ceil_mode, count_include_pad",
        each(
            lambda: nn.AvgPool2d(3, stride=2, padding=1),
            lambda: nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
            lambda: nn.AvgPool2d((2, 3), stride=2, ceil_mode=True),
        ),
        lambda n: [f(n, 2, 9, 10)],
    ),
    Feature(
        "AvgPool: divisor_override",
        lambda: nn.AvgPool2d(2, divisor_override=3),
        lambda n: [f(n, 2, 6, 8)],
        known=excused("the exporter drops divisor_override, which AveragePool has not", "outputs", "grad"),
    ),
    Feature(
        "adaptive pools",
        each(
            lambda: nn.AdaptiveAvgPool2d((2, 3)),
            lambda: nn.AdaptiveMaxPool2d((2, 3)),
            lambda: nn.AdaptiveAvgPool2d(1),
            lambda: nn.AdaptiveMaxPool2d(1),
        ),
        lambda n: [ramp(n, 2, 6, 9)],
    ),
    Feature(
        "adaptive pools to what does not divide",
        each(lambda: nn.AdaptiveAvgPool2d((4, 5))),
        lambda n: [f(n, 2, 6, 9)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "adaptive maximum with indices",
        lambda: nn.AdaptiveMaxPool2d((2, 3), return_indices=True),
        lambda n: [ramp(n, 2, 6, 9)],
    ),
    Feature(
        "LPPool", each(lambda: nn.LPPool2d(2, 2), lambda: nn.LPPool2d(3, 3, stride=2)), lambda n: [positive(n, 2, 6, 8)]
    ),
)

NORMALISATIONS: Final = (
    Feature(
        "BatchNorm1d, BatchNorm2d, BatchNorm3d",
        using(
            lambda: [nn.BatchNorm1d(4), nn.BatchNorm2d(4, affine=False), nn.BatchNorm3d(4)],
            lambda layers, x, y, z: (layers[0](x), layers[1](y), layers[2](z)),
        ),
        lambda n: [f(n, 4), f(n, 4, 5, 6), f(n, 4, 2, 3, 4)],
    ),
    Feature(
        "BatchNorm2d of the batch's statistics",
        lambda: nn.BatchNorm2d(4, track_running_stats=False),
        lambda n: [f(n, 4, 5, 6)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "InstanceNorm2d",
        each(lambda: nn.InstanceNorm2d(4), lambda: nn.InstanceNorm2d(4, affine=True)),
        lambda n: [f(n, 4, n + 3, 6)],
    ),
    Feature(
        "InstanceNorm2d of running statistics",
        lambda: nn.InstanceNorm2d(4, track_running_stats=True),
        lambda n: [f(n, 4, 5, 6)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "GroupNorm",
        each(lambda: nn.GroupNorm(2, 4), lambda: nn.GroupNorm(4, 4, affine=False), lambda: nn.GroupNorm(1, 4)),
        lambda n: [f(n, 4, 5, n + 3)],
    ),
    Feature(
        "LayerNorm",
        each(
            lambda: nn.LayerNorm(6),
            lambda: nn.LayerNorm((5, 6)),
            lambda: nn.LayerNorm(6, elementwise_affine=False),
            lambda: nn.LayerNorm(6, bias=False, eps=0.1),
        ),
        lambda n: [f(n, 5, 6)],
    ),
    Feature(
        "RMSNorm",
        each(lambda: nn.RMSNorm(6), lambda: nn.RMSNorm((5, 6), eps=0.1)),
        lambda n: [f(n, 5, 6)],
        exporters=(DYNAMO,),
    ),
    Feature(
        "LocalResponseNorm",
        each(lambda: nn.LocalResponseNorm(3), lambda: nn.LocalResponseNorm(2, alpha=0.1, k=2.0)),
        lambda n: [f(n, 6, 4, 5)],
    ),
)

ACTIVATIONS: Final = (
    Feature(
        "GELU, SiLU, Mish, Softplus, ELU, CELU, SELU",
        each(
            lambda: nn.GELU(),
            lambda: nn.GELU(approximate="tanh"),
            lambda: nn.SiLU(),
            lambda: nn.Mish(),
            lambda: nn.Softplus(),
            lambda: nn.ELU(0.7),
            lambda: nn.CELU(1.3),
            lambda: nn.SELU(),
        ),
        lambda n: [f(n, 20) * 3],
    ),
    Feature(
        "Softplus: beta, threshold",
        lambda: nn.Softplus(beta=2.0, threshold=5.0),
        lambda n: [f(n, 20) * 6],
        known=excused("the exporter drops the threshold", "outputs", "grad", by=(SCRIPT,)),
    ),
    Feature("Threshold", lambda: nn.Threshold(0.3, -2.0), lambda n: [f(n, 20)], exporters=(DYNAMO,)),
    Feature("RReLU", lambda: nn.RReLU(), lambda n: [f(n, 20)], exporters=(SCRIPT,)),
    Feature(
        "ReLU6, LeakyReLU, Hardtanh, Hardsigmoid, Hardswish, Hardshrink, Softshrink",
        each(
            lambda: nn.ReLU6(),
            lambda: nn.LeakyReLU(0.1),
            lambda: nn.Hardtanh(-0.5, 1.5),
            lambda: nn.Hardsigmoid(),
            lambda: nn.Hardswish(),
            lambda: nn.Hardshrink(0.7),
            lambda: nn.Softshrink(0.7),
        ),
        lambda n: [f(n, 20) * 3],
    ),
    Feature(
        "GLU, PReLU, LogSigmoid, Tanhshrink, Softsign",
        each(
            lambda: nn.GLU(1),
            lambda: nn.PReLU(),
            lambda: nn.PReLU(6),
            lambda: nn.LogSigmoid(),
            lambda: nn.Tanhshrink(),
            lambda: nn.Softsign(),
        ),
        lambda n: [f(n, 6, 5)],
    ),
    Feature(
        "Softmax, Softmin, LogSoftmax, Softmax2d, logsumexp",
        of(
            lambda x: (
                F.softmax(x, 1),
                F.softmin(x, -1),
                F.log_softmax(x, 2),
                nn.Softmax2d()(x),
                torch.logsumexp(x, (1, 3)),
                torch.logsumexp(x, 2, keepdim=True),
            )
        ),
        lambda n: [f(n, 4, 5, 6)],
    ),
    Feature("dropout in evaluation", each(lambda: nn.Dropout(0.5), lambda: nn.AlphaDropout(0.5)), lambda n: [f(n, 6)]),
)

LOSSES: Final = (
    Feature(
        "cross_entropy",
        of(
            lambda x, t: (
                F.cross_entropy(x, t),
                F.cross_entropy(x, t, weight=torch.arange(1.0, 6.0), ignore_index=2, reduction="sum"),
                F.cross_entropy(x, t, reduction="none"),
            )
        ),
        lambda n: [f(n, 5, 6), i(n, 6, high=5)],
    ),
    Feature(
        "cross_entropy: label_smoothing",
        of(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1)),
        lambda n: [f(n, 5), i(n, high=5)],
        exporters=(DYNAMO,),
        known=excused("the exporter drops label_smoothing", "outputs", "grad"),
    ),
    Feature(
        "nll_loss",
        of(lambda x, t: (F.nll_loss(x, t, ignore_index=1), F.nll_loss(x, t, reduction="none"))),
        lambda n: [f(n, 5, 3, 4), i(n, 3, 4, high=5)],
    ),
    Feature(
        "kl_div, binary_cross_entropy_with_logits, mse_loss",
        of(
            lambda x, p: (
                F.kl_div(F.log_softmax(x, 1), p, reduction="batchmean"),
                F.binary_cross_entropy_with_logits(x, p, reduction="none"),
                F.mse_loss(x, p),
            )
        ),
        lambda n: [f(n, 5), torch.softmax(f(n, 5), 1)],
    ),
    Feature(
        "binary_cross_entropy, l1, smooth_l1, huber, triplet_margin",
        of(
            lambda x, y, z: (
                F.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(y)),
                F.l1_loss(x, y, reduction="sum"),
                F.smooth_l1_loss(x, y, beta=0.5),
                F.huber_loss(x, y, delta=0.7),
                F.triplet_margin_loss(x, y, z),
            )
        ),
        lambda n: [f(n, 5), f(n, 5), f(n, 5)],
        exporters=(DYNAMO,),
    ),
)

TABLES: Final = {
    "torch: convolutions": CONVOLUTIONS,
    "torchvision: deform_conv2d": DEFORMED,
    "torch: pools": POOLS,
    "torch: normalisations": NORMALISATIONS,
    "torch: activations": ACTIVATIONS,
    "torch: losses": LOSSES,
}
CASES: Final = cases(TABLES)
REFUSED: Final = {
    f"AvgPool to sizes that do not divide / {SCRIPT}": "output size that are not factor of input size",
    f"BatchNorm2d without running statistics / {SCRIPT}": "batch_size and channel_size must be non-None",
    f"Bilinear / {SCRIPT}": "aten::bilinear is not supported",
    f"binary_cross_entropy, l1_loss / {SCRIPT}": "aten::binary_cross_entropy and aten::l1_loss are not supported",
    f"cross_entropy of probabilities / {DYNAMO}": "writes SoftmaxCrossEntropyLoss, whose labels must be integers",
    f"cross_entropy with label_smoothing / {SCRIPT}": "ONNX does not support label_smoothing",
    f"ctc_loss / {DYNAMO}": "DynamicOutputShapeException: aten._ctc_loss.Tensor",
    f"ctc_loss / {SCRIPT}": "aten::ctc_loss is not supported",
    f"FractionalMaxPool2d / {DYNAMO}": "No ONNX function found for aten.fractional_max_pool2d",
    f"FractionalMaxPool2d / {SCRIPT}": "aten::fractional_max_pool2d is not supported",
    f"InstanceNorm2d of running statistics / {SCRIPT}": "ONNX export of instance_norm training for unknown batch size",
    f"MaxUnpool2d / {SCRIPT}": "TypeError: cond must be a bool, but got a Tensor",
    f"RMSNorm / {SCRIPT}": "aten::rms_norm is not supported",
    f"RReLU / {DYNAMO}": "No ONNX function found for aten.rrelu_with_noise_functional",
    f"spectral_norm / {SCRIPT}": "aten::vdot is not supported",
    f"Threshold / {SCRIPT}": "ONNX export of operator threshold, non-zero threshold",
}
"""What has no line: what an exporter refuses to write, or writes as the specification forbids."""

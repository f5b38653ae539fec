"""Notes on rows that are slower than a rival: where the time goes, and what was tried.

Keys are ``group/row`` as docs/performance.json has them; a ``*`` stands for any text, and the first that fits counts.
Figures are measured again; these notes are kept. Unless a note names a processor, it was an AMD EPYC (Zen 4) with two
cores.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

_CONVOLUTIONS: Final = (
    "Nine tenths of the time are XLA's kernels for convolutions and products, at 120 to 170 GFLOP/s beside about 200 "
    "that two cores have. Tried: Winograd's way for images of 14x14 too (4.6 ms a layer rather than 4.0), columns for"
    " 3x3 beyond 64 pixels (4.3 rather than 2.5), weights as the left operand of 1x1 (no difference on this "
    "processor), oneDNN's kernels (kept for images of few channels, half the time; 0.5 to 1.1 times as fast "
    "elsewhere), with bias, sum and Relu in them too (0 to 15 % of such a layer), BatchNormalization in the weights "
    "(kept; processor time of MobileNetV2 10.2 to 9.6 ms, ResNet-50 89.8 to 86.5, a classifier of text lines 1.34 to "
    "1.22; for U-Net, EfficientNet and a recognizer of text none), what stands before a convolution in its weights "
    "(none), results of residual blocks kept rather than computed in each later block too (kept; ResNet-50 95 to 88 "
    "ms of one core, 790 to 730 for 8 images), images some at a time up to the last large value (kept; 735 to 670)."
)
_NARROW: Final = (
    "The first layers multiply 12 544 pixels by matrices of 32 x 96, where XLA's product reaches 50 to 80 GFLOP/s; "
    "depthwise layers take no longer than the activations around them. Tried: activation behind the padding, zeros "
    "joined on, an update of a padded buffer (all 1.1 to 2 times as long as padding behind the activation). Padding a"
    " column more than needed, so that XLA does not compute the middle part anew (kept; MobileNetV2 0.92 to 0.97 of "
    "the processor time), means of pixels as rows by the image as it lies (kept; EfficientNet with both 153 to 134 ms"
    " for 8 images). Of 8 images some at a time (kept): MobileNetV2 141 to 79 ms of one core, 38 of them the system's"
    " for 78 MB of memory got anew in each call; EfficientNet 204 to 144. Tried against those: glibc told to keep "
    "memory (none beyond 64 MB: XLA's threads have arenas of that size), huge pages (89, before the process starts)."
)
_RECURRENT: Final = (
    "With one thread onnxruntime takes as long: 8.8 us of processor time a step of a GRU of 256 beside its 9.6, an "
    "LSTM 12.7 and 12.8, GRU of 8 rows 47 and 45, LSTM 60 and 52. It shares a product of one row, 1 MB that one core "
    "reads, between two. Tried: each gate's inputs an array of their own, so that XLA vectorizes what lies around the "
    "product (kept: a GRU of 8 rows 75 to 47 us a step, of one 13.2 to 8.8), the next step's inputs carried along in "
    "place of that (as good for GRU, LSTM 3 to 8 % slower), parts of the matrix taken outside the loop (kept: 29 to "
    "9.3 us where the reset gate comes first), the matrix as it lies for one row (kept, 7 %), a batch padded to 2 "
    "(twice as long), two half products (three times, each is handed to another thread), unrolling by 2, 4 and 5 "
    "(none), two loops that do not depend on each other (XLA runs one after the other in one thread). With jax 0.12 an"
    " LSTM takes as much of the processor (4.5 ms); a layer of it by hand 2.1 ms with the matrix either way round, "
    "unrolled by 2 or 5, or behind a barrier, 2.6 as a sum, 2.8 for two rows, 5.1 by gate. XLA's vectors of 512 bits "
    "and its preset for fast programs: none, with all networks here."
)
_INTEGERS: Final = (
    "A core reaches 130 to 140 GOP/s with XLA:CPU's kernels for int8 of jaxlib 0.10, which do without VNNI (90 with "
    "those for float32, 180 with those for bfloat16), and 270 to 350 with oneDNN's, which lie in the same library and "
    "are called for products and convolutions of int8 since: processor time of ResNet-18 33 to 17 ms, or 35 to 15 from"
    " QDQ (onnxruntime: 16; MaxPool of bytes there, kept, 0.97), of the transformer 29 to 17 (28). jaxlib 0.12 has "
    "such kernels in XLA itself (300). "
    "Tried: int8 convolutions in place of exact float32 ones (kept, half the time), products of columns in bfloat16 "
    "(as long as convolutions of int8). The first layer for 8 images, 7x7 over 3 channels: columns 20.9 ms, oneDNN's "
    "convolution 9.6 (kept), of four pixels as 12 channels 8.7, of exact float32 35: all of it with QLinearConv 0.7 of"
    " the processor time. A step of a recurrent layer, a row by 256x1024: 12 to 17 us in int8, int16, bfloat16 and "
    "float32 alike (11.5 in float32 that lies as rows), 16 by oneDNN, 48 to 80 as a sum of products, 10 by oneDNN with"
    " the weight put into its order once (kept; 7 of them are the call); two rows by 768x3072 176, 108 and 51. "
    "Quantizing h and the gates take 2 us; h quantized at the end of the step before, its sums by gate, or minimum and"
    " maximum as one reduction: none. Parts of input weights handed over rather than cut out in each call: 1 to 3 %."
)
_CALLS: Final = (
    "Of `run` 12 to 15 us are Python and JAX's way into a program; the rest is the program, in the thread of the "
    "caller since it is loaded on a CPU client that has no other (an MLP: 54 to 16 us). A call `model(x)` hands a "
    "program of more than 1000 operations to a thread of XLA's, which takes longer than such a program; its results "
    "brought over from that client would cost as much (device_put 45 us, dlpack 50). Each weight costs 0.4 us: joining "
    "small ones to one argument made programs of twice the compile time. A few small steps are called in NumPy instead "
    "(kept: iris, 22 to 11 us of processor time; of 11 us 5 are products, 1 np.errstate, 2.5 to tell the call's kind; "
    "an MLP of 784, 128 and 10 for one row, 28 to 18, of which 5 are reading the first matrix). "
    "Tried: the same for 16 steps over 139 rows of 64 (34 us rather than 33)."
)
_HOST: Final = (
    "Strings, maps and counts that depend on data are worked on by NumPy, node by node: 2.6 us a node beyond its "
    "operator, 20 us for each stage that is compiled, 25 us for an output that becomes JAX's array. Kept: tables from "
    "attributes made once, stages in the thread of the caller and called straight, small ones by NumPy, boxes compared "
    "64 at a time (of yolov8_nms's processor time half is NonMaxSuppression). Tried: device_put for outputs (45 us), "
    "boxes compared one by one, and all at once."
)
_FORESTS: Final = (
    "A step down a tree gathers one word of 64 bits, with split, feature and children (kept; processor time: 80 trees "
    "of LightGBM over 114 rows 0.62 to 0.20 ms, 300 of XGBoost over 200 rows 0.30 to 0.18, 60 of a random forest 0.42 "
    "to 0.18). Tried: splits in a table of their own (the walk 0.25 rather than 0.17), all splits compared at once and "
    "leaves found by masks (0.60; 0.12 rather than 0.21 for trees of 16 leaves; 7 words a mask for 214), "
    "masks in NumPy (40 trees of 8 leaves over 40 rows: 43 us rather than 18), loops unrolled (as long), a tree of 23 "
    "splits as a product of comparisons and ways (22 us a call rather than 19, of which JAX's way in is 14)."
)
_SINGLE: Final = (
    "An operator alone pays in each call for what a network pays once: images are brought channels last and back, and "
    "12 to 15 us of Python and JAX."
)
READY: Final = (
    "Of a convolutional network two thirds of the processor time are XLA compiling, the rest is tracing. Of "
    "ResNet-50's 2.9 s LLVM takes 1.7 for 61 kernels (those that are equal are compiled once; a third of it are "
    "Winograd's), XLA's passes 0.2, tracing 0.2, the passes of this package 0.3, lowering 0.15, weights 0.3. Tried "
    "for ResNet-50, in processor time: convolutions of one kind traced once (kept, 0.55 to 0.41 s), the file read in "
    "parts (kept, 0.24 to 0.03), sums of residual blocks computed once rather than in each later block (kept: "
    "compiling 2.0 to 1.8 and a call 88 to 85 ms; of 32 blocks of 1x1 convolutions convert and the first call 2.2 to "
    "0.85 s, a call 79 to 21 ms), the same by calls that are not inlined (as fast), by optimization_barrier (XLA of "
    "jax 0.10 takes it away) or by images as rows (XLA fuses across them as well), XLA's options for one program "
    "(xla_backend_optimization_level=1: 2.05 to 1.75 s with calls as long, EfficientNet's 4.2 to 4.05; 0: 1.3, calls "
    "1.5 times as long; xla_llvm_disable_expensive_passes: none; one or two splits of the code: 2.4 and 2.3; "
    "YNNPACK's fusions with sums: 3.3, calls 1.3 times as long), Python's garbage collector off (0.1 s, but a setting"
    " of the process), weights prepared by another thread while XLA compiles (the same processor time; by the clock "
    "0.25 s at most, not shown on a machine with other work). From the cache most of the time is reading weights and "
    "preparing them."
)

MEMORY: Final = (
    "Of a small network nearly all is what XLA and LLVM take while they compile, and give back: 64 to 145 MB, "
    "whatever the weights, whether the code is split in 1, 4 or 128 parts. By hand in JAX, with "
    "weights in memory, MobileNetV2 grows to 120 MB and ResNet-50 to 266. Ours beside that are 10 to 15 MB of "
    "tracing, and weights as the program takes them, which Winograd's way makes 1.8 times as large (UNet, 171 and "
    "by hand 120). Kept: what compiling has freed is given back before the first call (MobileNetV2 129 to 117 MB at "
    "most, and 61 afterwards), files from 4 MB on read in parts (105), arrays let go of while weights are prepared "
    "(ResNet-50: 221 to 145 before compiling). Not tried: compiling before weights are prepared."
)

_TRANSFORMERS: Final = (
    "The time is that of XLA's products, 94 % of a decoder's step for one row and 98 % for eight: by hand it takes as "
    "long. One row reads weights at 15 to 17 GB/s with one core, in onnxruntime at 19 to 21, which shares them "
    "between two. Eight rows by 768 x 2688 reach 32 GFLOP/s in one core (XLA's kernel takes 5 and then 3), "
    "onnxruntime 58. Tried there: oneDNN 31, weights transposed 21 to 24, loops over the rows of the weights 3 to 13, "
    "weights in panels of 64 columns 38 (52 by 768 x 32000), which would lie in memory beside those that prompts are "
    "multiplied by."
)

_HALVES: Final = (
    "Maxima of float16 are taken in float32 (kept: 0.81 of the processor time, the same numbers). Tried on the first "
    "pool with its convolution's bias: values kept in float32 from one convolution to the next 0.3 ms rather than 3.4, "
    "now 1.3; that would leave out roundings, and infinities beyond 65504, which the file asks for."
)

STEPS: Final = (
    "Processor time of one core with jax 0.10, as `benchmarks/finetune.py` has its networks: four layers of "
    "attention 34 ms a step rather than 40, PyTorch eager 40; six convolutions 23.6 rather than 24.1, PyTorch "
    "22.9; four inverted residuals (32 to 128 channels, 16 images of 16x16) 50 rather than 106, PyTorch 52, the "
    "same by hand in JAX, channels last, 93. Gradients of matrices turned round (kept): 0.7 ms rather than 2.1. "
    "Of the convolutions, XLA already keeps images channels last; what is left is 8 tenths its kernels, 2 ms of "
    "transposes before gradients of weights and 1 ms of weights transposed in each step. Tried for the gradient "
    "of a 3x3 weight, 32 channels of 16x16: XLA's own convolution with batch and channels swapped 2.3 ms (kept), "
    "a product for each of 9 taps 4.1, one of columns 5.6, three of columns along rows 3.8 to 4.7, columns of the "
    "result's gradient 4.3. With strides of 2: the image's gradient by residues 0.97, drawn apart 0.85 (kept). "
    "Depthwise weights: sums over products 3.6, by quarters 0.75 (kept), in a loop over images 0.8, 16 terms at "
    "once 3.2. MaxPool, 3x3 by 2 over 8 images of 56x56: select_and_scatter 44 ms, selections 5.7 (kept). A "
    "product of 512 columns, turned round, still takes 1.3 ms where 0.7 would do: a transpose held apart by a "
    "barrier gains that with jax 0.12 and not with 0.10. Not tried: layouts of the state's own for weights."
)

NOTES: Final[dict[str, str]] = {
    "models/squeezenet_fp16": f"{_CONVOLUTIONS} {_HALVES}",
    "networks/resnet50*": _CONVOLUTIONS,
    "networks/unet*": _CONVOLUTIONS,
    "networks/mobilenet_v2*": f"{_CONVOLUTIONS} {_NARROW}",
    "networks/efficientnet*": f"{_CONVOLUTIONS} {_NARROW}",
    **dict.fromkeys(("networks/vit*", "networks/bert*", "networks/gpt2*"), _TRANSFORMERS),
    "networks/lstm*": _RECURRENT,
    "networks/gru*": _RECURRENT,
    "networks/int8*": _INTEGERS,
    "networks/mlp*": _CALLS,
    "calls/*": _CALLS,
    "operators/*": _SINGLE,
    **dict.fromkeys(("models/tashkeel*", "models/voicefilter*", "models/opennsfw*"), _INTEGERS),
    **dict.fromkeys(("models/sk_digits_kmeans*", "models/sk_digits_mlp_pca*"), "Small programs: " + _CALLS),
    **dict.fromkeys(("models/lgbm*", "models/xgb*", "models/sk_digits_rf*", "models/surfaces_validity*"), _FORESTS),
    **dict.fromkeys(("models/sk_*", "models/ort_logreg*", "models/yolov8_nms*"), _HOST),
    **dict.fromkeys(("models/yolox*", "models/yunet*", "models/squeezenet*", "models/*dnsmos*"), _CONVOLUTIONS),
    "models/light*": "Weights made by ConstantOfShape are kept (three quarters of AlexNet). " + _CONVOLUTIONS,
    "models/*": "Small programs: " + _CALLS,
}


def note(key: str) -> str:
    """The note on a row."""
    return next((text for name, text in NOTES.items() if fnmatchcase(key, name)), "not looked into yet.")

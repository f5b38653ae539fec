"""Explanations of rows that are slower than a rival: where the time is spent, and what was tried.

``NOTES`` maps rows, ``group/row`` as docs/performance.json names them, to explanations; ``*`` stands for any text, and
the first pattern that fits counts. ``CLASSES`` groups rows for the summary. ``make bench`` measures figures again and
keeps explanations. Unless one names another processor, it was measured on two cores of an AMD EPYC (Zen 4).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final, NamedTuple


class Explanation(NamedTuple):
    """Why rows are slow.

    Attributes:
        title: the heading, which is the anchor too.
        text: where the time is spent.
        tried: what was tried, each with its figures; what is in use says so.
    """

    title: str
    text: str
    tried: tuple[str, ...] = ()


CONVOLUTIONS: Final = Explanation(
    "Convolutions",
    "90 % of the time is spent in XLA's kernels for convolutions and products, which reach 120 to 170 GFLOP/s of the "
    "200 that two cores have.",
    (
        "In use: BatchNormalization folded into weights. Processor time of MobileNetV2 10.2 to 9.6 ms, of ResNet-50 "
        "89.8 to 86.5, of a text line classifier 1.34 to 1.22; no gain for U-Net, EfficientNet and a text recogniser.",
        "In use: sums of residual blocks materialised rather than recomputed in each later block. ResNet-50 95 to 88 "
        "ms of one core, 790 to 730 for 8 images.",
        "In use: microbatches up to the last large value. ResNet-50 for 8 images 735 to 670 ms.",
        "In use: oneDNN's kernels for images of few channels, in half the time. Elsewhere 0.5 to 1.1 times as fast; "
        "with bias, sum and Relu fused 0 to 15 % of such a layer.",
        "Winograd's algorithm for 14 x 14 images: 4.6 ms a layer instead of 4.0.",
        "im2col for 3 x 3 kernels beyond 64 pixels: 4.3 ms instead of 2.5.",
        "Weights as the left operand of 1 x 1 convolutions, and scales before a convolution folded into its weights: "
        "no gain.",
    ),
)
NARROW: Final = Explanation(
    "Narrow layers",
    "The first layers of mobile networks multiply 12 544 pixels by 32 x 96 matrices, where XLA's product reaches 50 "
    "to 80 GFLOP/s. Depthwise layers take no longer than the activations around them.",
    (
        "In use: depthwise convolutions pad one column more than needed, so that XLA does not recompute the unpadded "
        "image: MobileNetV2 0.92 to 0.97 of the processor time.",
        "In use: means over pixels read the image in its layout. EfficientNet, with the padding, 153 to 134 ms for 8 "
        "images.",
        "In use: microbatches. MobileNetV2 141 to 79 ms of one core for 8 images, 38 of which the system spent on 78 "
        "MB of fresh memory in each call; EfficientNet 204 to 144.",
        "Activation after padding, concatenated zeros, updates of a padded buffer: 1.1 to 2 times as long.",
        "Telling glibc to keep memory: no gain beyond 64 MB, the size of XLA's arenas. Huge pages: 89 ms, but only "
        "if set before the process starts.",
    ),
)
RECURRENT: Final = Explanation(
    "Recurrent layers",
    "On one thread onnxruntime takes as long: a step of a GRU of 256 takes 8.8 us of processor time here and 9.6 "
    "there, an LSTM 12.7 and 12.8; for 8 rows a GRU takes 47 and 45, an LSTM 60 and 52. For one row, onnxruntime "
    "splits the product between two threads: 1 MB of weights is read by two cores instead of one.",
    (
        "In use: each gate's inputs as an array, so that XLA vectorises the operations around the product. A GRU of "
        "8 rows 75 to 47 us a step, of one row 13.2 to 8.8.",
        "In use: slices of the weights taken outside the loop, where the reset gate comes first: 29 to 9.3 us.",
        "In use: the weight in its stored layout for one row: 7 %.",
        "Inputs of the next step carried along: the same for GRU, LSTM 3 to 8 % slower.",
        "Batch padded to 2: twice as long. Two half products: three times, because each goes to another thread.",
        "Unrolling by 2, 4 and 5: no gain. Two independent loops: XLA runs one after the other, with its scheduler for "
        "concurrency too. Both directions in one loop: no gain; with their products as a batch of two, 0.72 ms rather "
        "than 1.06 for 33 steps of 256 with jax 0.10, but 1.04 rather than 0.99 with 0.12, whose loops use one thread.",
        "With jax 0.12 an LSTM takes the same processor time (4.5 ms). A layer by hand takes 2.1 ms with either "
        "layout of the weight, unrolled or not, 2.6 as a sum, 2.8 for two rows, 5.1 by gate.",
        "512-bit vectors in XLA and its preset for fast programs: no gain on any network of this page.",
    ),
)
INTEGERS: Final = Explanation(
    "int8",
    "XLA:CPU's int8 kernels of jaxlib 0.10 use no VNNI and reach 130 to 140 GOP/s on a core (float32 90, bfloat16 "
    "180). oneDNN's, in the same library, reach 270 to 350 and are called for products and convolutions. XLA of "
    "jaxlib 0.12 has kernels that reach 300.",
    (
        "In use: oneDNN. Processor time of ResNet-18 33 to 17 ms, from QDQ 35 to 15 (onnxruntime: 16), of a "
        "transformer 29 to 17 (28).",
        "In use: MaxPool between DequantizeLinear and QuantizeLinear on bytes (0.97); int8 convolutions instead of "
        "exact float32 ones (half the time).",
        "In use: oneDNN for the first layer of 8 images, 7 x 7 over 3 channels, 9.6 ms. im2col: 20.9; four pixels as "
        "12 channels: 8.7; exact float32: 35.",
        "Columns multiplied in bfloat16: as long as int8 convolutions.",
        "A step of a recurrent layer, one row by 256 x 1024: 12 to 17 us in int8, int16, bfloat16 and float32 alike "
        "(11.5 in float32 stored as rows), 16 by oneDNN, 10 by oneDNN with packed weights (in use; 7 of them are the "
        "call), 48 to 80 as a sum of products. Two rows by 768 x 3072: 176, 108 and 51.",
        "Quantising h and the gates takes 2 us. Quantising h at the end of the step before, sums by gate, minimum "
        "and maximum in one reduction: no gain. Passing slices of input weights as arguments: 1 to 3 %.",
        "The weight in float32, made outside of the loop: 11.6 us rather than 13.5, with jax 0.12 11.9 rather than "
        "12.6; networks 1.03 to 1.09 and 0.95 to 1.03 times as fast. A row's 256 terms in one operation: 740 to 1,340.",
    ),
)
CALLS: Final = Explanation(
    "Small programs",
    "12 to 15 us of `run` are Python and JAX's dispatch. `model(x)` gives programs of more than 1000 operations to a "
    "thread of XLA's, which takes longer than a short program; each parameter costs 0.4 us.",
    (
        "In use: `run` executes short programs in the caller's thread, on a synchronous CPU client (an MLP 54 to 16 "
        "us).",
        "In use: programs of a few small steps run in NumPy (iris 22 to 11 us, of which 5 are products, 1 "
        "np.errstate and 2.5 the signature; an MLP of 784, 128 and 10 for one row 28 to 18, of which 5 read the "
        "first matrix).",
        "NumPy for 16 steps over 139 rows of 64: 34 us instead of 33.",
        "Results of `model(x)` from the synchronous client: device_put 45 us, dlpack 50.",
        "Small parameters concatenated into one argument: twice the compile time.",
    ),
)
HOST: Final = Explanation(
    "Strings, maps and data-dependent sizes",
    "NumPy runs these nodes one by one: 2.6 us a node beyond its operator, 20 us for each compiled partition, 25 us "
    "for an output that becomes a JAX array.",
    (
        "In use: tables computed once from attributes; partitions in the caller's thread, small ones in NumPy; boxes "
        "compared 64 at a time (half of yolov8_nms's processor time is NonMaxSuppression).",
        "device_put for outputs: 45 us. Boxes compared one by one, or all at once: slower.",
    ),
)
FORESTS: Final = Explanation(
    "Tree ensembles",
    "A step down a tree gathers one 64-bit word with split, feature and children.",
    (
        "In use: that word. Processor time of 80 LightGBM trees over 114 rows 0.62 to 0.20 ms, 300 XGBoost trees "
        "over 200 rows 0.30 to 0.18, a random forest of 60 0.42 to 0.18.",
        "Splits in a table of their own: the walk takes 0.25 ms instead of 0.17.",
        "All splits compared at once, and leaves found by masks: 0.60; for trees of 16 leaves 0.12 instead of 0.21, "
        "for 214 leaves 7 words a mask. Masks in NumPy: 43 us instead of 18 for 40 trees of 8 leaves over 40 rows.",
        "Unrolled loops: no gain. A tree of 23 splits as a product: 22 us a call instead of 19, of which 14 are "
        "dispatch.",
    ),
)
SINGLE: Final = Explanation(
    "Single operators",
    "One operator pays in each call for what a network pays once: 12 to 15 us of Python and JAX, and the layout of "
    "images.",
)
TRANSFORMERS: Final = Explanation(
    "Transformers",
    "94 % of a decoder step for one row, and 98 % for eight, is spent in XLA's products; JAX by hand takes as long. "
    "One row reads weights at 15 to 17 GB/s on one core; onnxruntime reads them at 19 to 21 on two. Eight rows by "
    "768 x 2688 reach 32 GFLOP/s on one core, because XLA's kernel takes 5 rows and then 3; onnxruntime reaches 58.",
    (
        "For eight rows: oneDNN 31 GFLOP/s, transposed weights 21 to 24, loops over rows of the weights 3 to 13.",
        "Weights in panels of 64 columns: 38 (52 for 768 x 32000), but a second copy of the weights would be kept "
        "for prompts.",
    ),
)
HALVES: Final = Explanation(
    "float16",
    "XLA:CPU converts float16 to float32 and back around each operation.",
    (
        "In use: maxima of float16 computed in float32, with the same numbers (0.81 of the processor time).",
        "Values kept in float32 between convolutions: 0.3 ms for the first pool and its convolution's bias instead "
        "of 1.3, but that omits roundings, and infinities beyond 65504, which the file asks for.",
    ),
)
GENERATED: Final = Explanation(
    "Generated weights",
    "The light models of ONNX's test suite generate weights by ConstantOfShape. They are computed once: three "
    "quarters of AlexNet's time.",
)
EXPLANATIONS: Final = (
    CONVOLUTIONS,
    NARROW,
    TRANSFORMERS,
    RECURRENT,
    INTEGERS,
    HALVES,
    FORESTS,
    HOST,
    CALLS,
    SINGLE,
    GENERATED,
)

READY: Final = Explanation(
    "Until a model is ready",
    "Two thirds of a convolutional network's processor time is XLA compiling, the rest tracing. Of ResNet-50's 2.9 "
    "s, LLVM takes 1.7 for 61 kernels (equal ones are compiled once; a third of it is Winograd's algorithm), XLA's "
    "passes 0.2, tracing 0.2, this package's passes 0.3, lowering 0.15, weights 0.3. From the cache, most of the "
    "time is reading and hoisting weights. With background_compile=True, NumPy evaluates the first call, and nothing "
    "is compiled. Over 67 real files, onnxruntime's time over ours is 0.04 in geometric mean, 0.23 from the cache and "
    "0.48 with background_compile; over these networks 0.13, 0.56 and 0.88.",
    (
        "In use: the first call by NumPy, on request; calls before the program is ready take as long as in NumPy. "
        "Compiling beside that call rather than after the second: a call of 40 ms took 800, because tracing holds the "
        "interpreter lock. Operator by operator through XLA: 18 s for a text detector, in 930 kernels.",
        "In use: convolutions of one kind traced once (0.55 to 0.41 s); the file read in parts (0.24 to 0.03); sums "
        "of residual blocks materialised (compiling 2.0 to 1.8 s; 32 blocks of 1 x 1 convolutions 2.2 to 0.85 s "
        "until the first result, a call 79 to 21 ms).",
        "In use: operators traced in their form for a CPU alone, convolutions lowered once, after tracing (YOLOX-nano "
        "2.05 to 1.72 s, a classifier of text lines 2.26 to 1.92). For gradients in 32-bit mode, the backward pass "
        "traced once rather than three times (MobileNetV2 8 to 3 s), and a training step for a CPU alone (5 to 2).",
        "The same by calls that are not inlined: no gain. By optimization_barrier, or images as rows: XLA removes "
        "the one and fuses across the other.",
        "xla_backend_optimization_level=1: 2.05 to 1.75 s, calls as long (EfficientNet 4.2 to 4.05); 0: 1.3 s, calls "
        "1.5 times as long.",
        "xla_llvm_disable_expensive_passes: no gain. Code split in one or two parts: 2.4 and 2.3 s. YNNPACK's "
        "fusions: 3.3 s, calls 1.3 times as long.",
        "Garbage collector off: 0.1 s, but it is a setting of the process. Hoisting in a thread while XLA compiles: "
        "at most 0.25 s of wall time, not reproducible on a busy machine.",
    ),
)
MEMORY: Final = Explanation(
    "Memory until then",
    "XLA and LLVM take 64 to 145 MB while they compile, whatever the weights, and free them. By hand in JAX, with "
    "weights in memory, MobileNetV2 grows to 120 MB and ResNet-50 to 266. Ours adds 10 to 15 MB of tracing, and "
    "weights in the program's layout, which Winograd's algorithm makes 1.8 times as large (U-Net 171, by hand 120).",
    (
        "In use: freed memory returned before the first call (MobileNetV2 129 to 117 MB at most, 61 afterwards); "
        "files from 4 MB read in parts (105); arrays freed while weights are hoisted (ResNet-50 221 to 145 before "
        "compiling).",
        "Code split in 1, 4 or 128 parts: no difference. Compiling before weights are hoisted was not tried.",
    ),
)
STEPS: Final = Explanation(
    "Training steps",
    "Processor time of one core with jax 0.10, for the networks of `benchmarks/finetune.py`: four layers of "
    "attention 34 ms a step (40 without passes, PyTorch eager 40); six convolutions 23.6 (24.1, PyTorch 22.9); four "
    "inverted residuals of 32 to 128 channels over 16 images of 16 x 16 50 (106, PyTorch 52, JAX by hand in NHWC "
    "93). XLA keeps images channels-last by itself; 80 % of what is left is its kernels, 2 ms transposes before "
    "weight gradients, 1 ms transposes of weights in each step.",
    (
        "In use: transposed gradients of matrices, 2.1 to 0.7 ms.",
        "Gradient of a 3 x 3 weight, 32 channels of 16 x 16: XLA's convolution with batch and channels swapped 2.3 "
        "ms (in use), a product for each of 9 taps 4.1, one product of columns 5.6, three of columns along rows 3.8 "
        "to 4.7, columns of the result's gradient 4.3.",
        "Stride 2: the image's gradient by residues 0.97, dilated 0.85 (in use).",
        "Depthwise weights: sums over products 3.6, by quarters 0.75 (in use), in a loop over images 0.8, 16 terms "
        "at once 3.2.",
        "MaxPool 3 x 3 by 2 over 8 images of 56 x 56: select_and_scatter 44 ms, selections 5.7 (in use).",
        "A transposed product of 512 columns takes 1.3 ms where 0.7 is possible: a transpose behind a barrier gains "
        "that with jax 0.12, not with 0.10. Layouts of the state's own were not tried.",
    ),
)

NOTES: Final[dict[str, tuple[Explanation, ...]]] = {
    "models/squeezenet_fp16": (CONVOLUTIONS, HALVES),
    **dict.fromkeys(("networks/resnet50*", "networks/unet*"), (CONVOLUTIONS,)),
    **dict.fromkeys(("networks/mobilenet_v2*", "networks/efficientnet*"), (CONVOLUTIONS, NARROW)),
    **dict.fromkeys(("networks/vit*", "networks/bert*", "networks/gpt2*"), (TRANSFORMERS,)),
    **dict.fromkeys(("networks/lstm*", "networks/gru*"), (RECURRENT,)),
    "networks/int8*": (INTEGERS,),
    **dict.fromkeys(("networks/mlp*", "calls/*"), (CALLS,)),
    "operators/*": (SINGLE,),
    **dict.fromkeys(("models/tashkeel*", "models/voicefilter*", "models/opennsfw*"), (INTEGERS,)),
    **dict.fromkeys(("models/lgbm*", "models/xgb*", "models/sk_digits_rf*", "models/surfaces_validity*"), (FORESTS,)),
    **dict.fromkeys(("models/sk_digits_kmeans*", "models/sk_digits_mlp_pca*"), (CALLS,)),
    **dict.fromkeys(("models/sk_*", "models/ort_logreg*", "models/yolov8_nms*"), (HOST,)),
    **dict.fromkeys(("models/yolox*", "models/yunet*", "models/*dnsmos*", "models/ocrspine*"), (CONVOLUTIONS,)),
    "models/light*": (GENERATED, CONVOLUTIONS),
    "models/*minilm*": (TRANSFORMERS,),
    "models/styletransfer*": (CONVOLUTIONS,),
    "models/*": (CALLS,),
}

CLASSES: Final[dict[str, tuple[str, ...]]] = {
    "Transformers": (
        *(
            "networks/bert*",
            "networks/vit*",
            "networks/gpt2*",
            "models/*minilm*",
            "models/nanoGPT*",
            "models/*attention*",
        ),
    ),
    "Large convolutional networks": (
        *("networks/resnet50*", "networks/unet*", "models/style*", "models/ppocrv4_det", "models/deepcut"),
        *("models/basic_pitch*", "models/eeg*", "models/light_vgg*", "models/light_alexnet", "models/light_resnet*"),
        *("models/light_bvlc*", "models/light_zfnet*", "models/light_densenet*", "models/light_inception*"),
    ),
    "Mobile convolutional networks": (
        *("networks/mobilenet*", "networks/efficientnet*", "models/yolox_nano", "models/yunet*", "models/squeezenet*"),
        *("models/*dnsmos*", "models/ppocr*", "models/ocrspine*", "models/light_shufflenet", "models/light_squeezenet"),
    ),
    "int8 convolutions and transformers": ("networks/int8*", "models/opennsfw*", "models/*int8_qdq", "models/*int4*"),
    "int8 recurrent networks": ("models/tashkeel*", "models/voicefilter*"),
    "Recurrent and audio networks": (
        *("networks/lstm*", "networks/gru*", "models/silero*", "models/aecmos*", "models/plcmos*", "models/attacut*"),
        *("models/oskut*", "models/khmersm", "models/magika"),
    ),
    "Tree ensembles": (
        *("models/lgbm*", "models/xgb*", "models/sk_digits_rf", "models/surfaces_validity*", "models/*isoforest"),
        *("models/ezkl_lightgbm", "models/ezkl_xgboost", "models/*gbr*"),
    ),
    "Strings, labels, maps, box selection": (
        *("models/sk_cat*", "models/*zipmap", "models/*titanic*", "models/ort_logreg*", "models/yolov8_nms"),
    ),
    "Other scikit-learn estimators": ("models/sk_*", "models/ezkl_linear_svc"),
    "Small networks": ("networks/mlp*", "models/*"),
}
"""Rows of models and networks by class; the first that fits counts."""


def explanations(key: str) -> tuple[Explanation, ...]:
    """The explanations of a row."""
    return next((found for pattern, found in NOTES.items() if fnmatchcase(key, pattern)), ())


def class_of(key: str) -> str | None:
    """The class of a model or network; None for other rows."""
    return next((name for name, some in CLASSES.items() if any(fnmatchcase(key, p) for p in some)), None)

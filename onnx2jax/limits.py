"""The table of thresholds that choose a lowering, a pass, or where nodes run: unit, value, and measurement.

Each part says on which processors and with which release of jax it was measured, and by which benchmark. Tolerances and
block sizes of one algorithm stay beside it.
"""

from __future__ import annotations

import os
from typing import Final


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return 2**43


MACHINE_MEMORY: Final = _machine_memory()
"""Bytes of memory of this machine; 8 TiB where the system does not say."""

# ------------------------------------------------------------------------------------------- calls and programs
# Medians on two Intel cores by benchmarks/thresholds.py; release of jax not recorded. A program of 20 light nodes
# compiles in 31 ms, and its nodes take 0.25 ms one after the other on the host, so compiling pays after some 130 runs:
# the first four follow.

BY_VALUE: Final = 32
"""Elements of an input of rank 1 or less (shapes, axes, counts, scales) up to which calls may specialise on its value.
Larger ones are data, which hardly repeat, and 31 ms for each would never pay."""
MOST_VALUES: Final = 8
"""Values of an input on which a Loop or If specialises before it runs on the host: 8 take a quarter second."""
MOST_SHAPES: Final = 8
"""Shapes for which a program inside a loop is compiled before it runs on the host: its state grows with every trip."""
HOST_TRIPS: Final = 64
"""Trips of a loop without heavy nodes that run on the host before the others are compiled: 64 trips of 20 nodes take
16 ms, half of what compiling takes, and most loops end before."""
MOST_FUSED: Final = 800
"""Light nodes in a row in one program: XLA fuses them into one kernel, for which it takes time and memory that grow
with the square of their number (1000 additions 2.4 s, 500 0.7 s), and fails beyond 2000."""
MOST_COMPILED: Final = 2500
"""Nodes in one program: 5000 mixed ones (products, softmax, reductions, elementwise) take 28 s of processor time in one
program, 13 in two, 9 in four (AMD EPYC with AVX-512, jax 0.10). Each program more costs its dispatch, 20 us a call."""
LARGEST_CONSTANT: Final = 4096
"""Known arrays with more elements than this are passed from program to program rather than compiled in. Up to 32 768
compile in the time that an argument takes (13 to 15 ms); a million in 56 ms against 19."""
LARGEST_IN_SIGNATURE: Final = 4096
"""Bytes of a known operand up to which its value is part of a function's signature, in 1.6 us; 65 536 would take 16 us
for each call in the graph. Beyond, the body is traced anew."""
NESTED_JITS: Final = 16
"""Functions deeper than this are traced in place: a nested jit takes a dozen of the 1000 frames of Python's stack."""
LARGEST_ARRAY: Final = MACHINE_MEMORY
"""Bytes of an array on the host: beyond them the node can be named, and NumPy would fill them for hours."""
LARGEST_TRACED: Final = 16 * MACHINE_MEMORY
"""Bytes of an array in a program: XLA never materialises some that are larger than the memory, as it fuses them into a
reduction. On a mesh each process has a part."""
MOST_GROWTH: Final = 8
"""Bytes of hoisted values per byte of the parameters they depend on, at most: biases broadcast to whole images would
take 38 MB in place of 3.6 for MobileNetV2. int4 weights as float32 take 8 times their bytes."""
SMALL_GROWTH: Final = 65_536
"""Bytes of hoisted values to which that limit does not apply."""
SHORT: Final = 100_000_000
"""FLOPs, or bytes read and written, up to which a program runs in the thread of a caller who waits for NumPy arrays
(1 ms): that saves 40 us a call; loading the program for it takes 12 ms and more."""
INLINE_CODE: Final = 1 << 20
"""Bytes of a program's serialized code up to which it is loaded for that: 0.15 ms a kB, where it is no constants."""
SMALL_PROGRAM: Final = 14
"""Microseconds of NumPy calls up to which a program runs in NumPy, for a caller who wants NumPy arrays: the dispatch
of a compiled program takes as long."""
AN_ARRAY: Final = 0.4
"""Microseconds of dispatch for each array."""
NUMPY_PRODUCT: Final = 1 << 18
"""Multiplications of a product up to which NumPy computes it: of larger ones it saves less than a tenth, and its
threads spin while they wait for each other. A row through seven layers of 5 million weights takes 69 ms rather than 3
where other processes use the cores."""
MOST_CANCELLED: Final = 2.0**12
"""By which a sum may exceed what is left of it, and the weights: of (y + c) - c, which rounds y, nothing is left."""

# ------------------------------------------------------------------------------- convolutions on a TPU, and on a GPU
# Cycles of a v5e, counted by XLA's compiler; times of an H200. Not re-measured.

CONV_FEW_INPUTS: Final = 8
"""Channels below which TPUs and GPUs compute patches of an image as one product: 16x16 over 8 images of 224x224 take
a v5e 27 thousand cycles rather than 240, 4x4 105 rather than 205; but 8x8 over 16 channels 77 rather than 67. With
a convolution there, ViT-small in float32 takes an H200 1.46 ms, and 1.26 by hand."""
CONV_LONG: Final = 32
"""Taps of a filter of one channel along one axis from which a TPU computes it as a product with a Toeplitz matrix:
256 taps over 16384 samples in 30 thousand cycles of a v5e rather than 8550, 32 taps in 26 rather than 1147. Strides
beyond a sixteenth of the taps do not pay: 400 taps 160 apart take 329 as they are."""
CONV_FEW_FILTERS: Final = 8
"""Filters, over as few images, that a TPU computes row by row: 3x39 from 8 channels to 8 over 172x264 in 47 thousand
cycles of a v5e rather than 1802, compiled in 2 s rather than 15; 3x3 from 64 to 1 over 224x224 in 85 rather than 297.
It does not pay for 64 filters or 128 images, and a few taps over fewer channels than results move more bytes."""

# ------------------------------------------------------------------------------------------- convolutions on a CPU
# Milliseconds of one core of an AMD EPYC (Zen 4), jax 0.10.2; see the table in ops/conv_cpu.py. Not re-measured,
# but for what names another release.

CONV_WINDOW: Final = 32
"""Numbers of a window up to which it goes by columns, whatever the image: 3x3 over 3 channels in 0.75 ms rather than
1.8, but 7x7 in 5.8 rather than 2.8. Larger ones go so where the result has no more pixels than channels."""
CONV_INT8_WINDOW, CONV_INT8_PIXELS = 256, 512
"""The same of int8, and pixels up to which larger windows go so: 14x14 pixels of 256 channels in 0.8 ms of processor
time rather than 1.5, 7x7 of 512 for 8 images in 5.3 rather than 7.0. XLA takes an image that it has to transpose
first, such as an input, by a slow kernel: 7x7 over 3 channels in 79 ms."""
CONV_SHORT_ROWS: Final = 40
"""Pixels up to which columns have the pixels last: a step forward and backward over 3x3 pixels of 512 channels takes
4.7 ms rather than 5.6, 6x6 to 3x3 of 512 5.0 rather than 5.9, but 7x7 of 512 13.0 rather than 10.8."""
CONV_GROUP_CHANNELS, CONV_GROUP_SIZE, CONV_GROUP_COLUMNS = 4, 1200, 2**22
"""Channels of a group, or channels times pixels, up to which groups go by columns while these, in numbers, stay in the
cache; others go one after the other. 32 groups: 24x24 pixels of 4 channels in 0.36 ms rather than 1.55, 12x12 of 8 in
0.26 rather than 0.45, 6x6 of 16 in 0.20 rather than 0.22; but 28x28 of 8 in 3.2 rather than 2.0, 10x10 of 16 in 0.60
rather than 0.44."""
CONV_FEW_CHANNELS: Final = 16
"""XLA:CPU has a fast kernel for convolutions, of 8 bits or of floats, that read or make more channels than this."""
MAX_SUMMANDS: Final = 2**31 // 2**14 - 1
"""Products of two int8 values whose sum stays below 2**31."""
CONV_PACKED_PRODUCTS, CONV_PACKED_INT8_PRODUCTS = 100_000, 1_000_000
"""Products from which neighbours in images of few channels, of floats and of int8, become channels: 208x208 pixels, 16
channels to 16, in 3.0 ms rather than 3.9; 720x720, 16 to 3 by 9x9, in 64 rather than 226; 14x14, 8 to 16 by 5x5, in
0.11 rather than 0.15."""
CONV_PACK_INT8: Final = 8
"""Channels that images of int8 get so: 7x7 by 2 over 3 channels with jax 0.12 in 1.5 ms rather than 3.0 by columns, 5x5
over 3 in 0.46 rather than 1.17, 3x3 over 3 for 64 in 2.5 rather than 3.1; with jax 0.10 in as long."""
WINOGRAD_SIDE, WINOGRAD_PIXELS, WINOGRAD_CHANNELS, WINOGRAD_PRODUCTS = 24, 2**14, 64, 100_000_000
"""The side of a result from which, and its pixels up to which, 3x3 kernels go by Winograd's way, which takes longer to
compile, from so many channels and products: 56x56 pixels of 64 channels in 1.7 ms rather than 2.6; 14x14 of 256 in 4.6
rather than 4.0. Tiles of larger images leave the cache: 224x224 of 64 in 35 rather than 27 (39 and 23 with jax 0.12),
901x161 of 128 to 64 in 249 rather than 209 (256 and 186), 224x224 of 128 in 79 rather than 85."""
ONEDNN_OF_ONE_ELEMENT, ONEDNN_OF_MORE = (32, 8192), (48, 1024)
"""Input channels up to which, and pixels from which, oneDNN computes a convolution, by the size of the kernel: 3x3 over
224x224 pixels of 3 channels in 0.21 ms rather than 0.42, 16 channels of 208x208 in 1.3 rather than 2.8, 7x7 over 3 in
1.4 rather than 2.7, 1x1 from 16 channels of 160x160 in 0.15 rather than 0.24. Of int8 those that would go by columns:
7x7 over 3 for 8 images in 9.6 ms rather than 20.9, 3x3 over 16 channels of 112x112 in 0.32 rather than 1.09."""
ONEDNN_FEW_OUTPUTS, ONEDNN_FEW_OUTPUTS_PRODUCTS = 24, 10_000_000
"""Output channels up to which it computes those from so many products, too: 384x384 pixels, 3 to 8 by 9x9, in 3.3 ms
rather than 6.3 by Eigen and 43 by YNNPACK, 16 to 3 in 14 rather than 39 and 231; 160x160, 96 to 8 by 3x3, in 4.3 rather
than 9.8 and 50."""
ONEDNN_PRODUCTS: Final = 400_000_000
"""Products from which it computes those of any channels, where neither columns nor Winograd serve: 224x224 of 64 in
17.5 ms rather than 22.6 by Eigen and 33 by YNNPACK, of 128 in 68 rather than 81 and 229, 900x160, 128 to 64, in 120
rather than 147 and 401."""
ONEDNN_INT8_PRODUCTS, ONEDNN_INT8_ROWS, ONEDNN_INT8_ROW_PRODUCTS = 2**18, 8, 2**20
"""Products of int8 from which it computes matrix products and convolutions, and from which where there are fewer rows
than that. Smaller ones take as long by XLA's kernels: 64x64 by 64x64 takes 16 us either way, 16x64 by 64x64 20 us; a
row by 256x1024 takes 17 us in a loop rather than 22; but a row by 768x3072 122 rather than 198, two 124 rather than
181."""
EIGEN_SMALL, EIGEN_LARGE, EIGEN_LONG = 500_000, 10_000_000, 64
"""Products up to which (jaxlib 0.11 and 0.12), or from which (0.10), Eigen computes a convolution faster than YNNPACK,
and the length of a kernel from which it does in any case (0.10); one by one from 0.2 to 115 million products.

3x3 over 56x56 pixels of 64 channels: 2.5 and 1.6 ms in 0.10, 1.3 and 1.45 in 0.12; over 8x8 of 16, to 32: 24 and 28 us
in 0.10, 75 and 25 in 0.12; over 160x160 of 96, to 8: 50.7 and 9.8 ms in 0.10; over 56x56 of 64, to 24: 2.1 and 1.1.
Of 100 from 3 to 96 channels to 1 to 24, from 10 million, one took YNNPACK less than 0.9 times as long."""

# ------------------------------------------------------------------------------------------------ other operators
# One or two cores of an AMD EPYC (Zen 4) with jax 0.10 where nothing else is named. By hand; not re-measured.

UNROLLED_TAPS: Final = 64
"""Taps of a window, or groups, up to which each is an operation: XLA compiles a loop for every slice, in 12 ms."""
XLA_FOLDED: Final = 2**14
"""Elements from which XLA folds a known array for longer than the rest of compilation takes, a tenth of a second."""
COUNTED_TRIPS: Final = 10_000
"""Trips that are counted before a loop is compiled."""
RECURRENT_UNROLL: Final = 8
"""Steps of a recurrence up to which it is unrolled."""
POOL_TAPS: Final = 9
"""Elements of float16 windows that are reduced at once; 5x5 takes 0.07 ms axis by axis, 0.4 ms at once."""
RESIZE_SCATTERS, RESIZE_GATHERS = 4, 32
"""Neighbours up to which the derivative of a gather is a scatter, and no product (XLA compiles 64 scatters for 10 s),
and up to which they are gathered: 86 of 1024x1024 pixels take 1.7 ms by a product with a matrix rather than 28 by
gathers, 34 8.7 rather than 9.1, 22 5.7 rather than 5.1."""
ATTENTION_BLOCK, ATTENTION_QUERIES = 2**25, 128
"""Scores of a block, if it has so many queries, since each block reads all keys and values; twice as many scores, 16
heads over 2048 tokens, are held at once. 16 heads over 8192 tokens take 205 MB of temporary memory on a TPU v5e in 121
million cycles, where all at once take 4362 MB and as many cycles; half as many scores take 136 MB and 138 million
cycles. Gradients take 339 MB, where all at once take 8658."""
ATTENTION_PARTS: Final = 4
"""Parts of the queries of causal attention, of ATTENTION_QUERIES or more, each of which reads only keys before its end.
A prefill of 8 prompts of 512 tokens, two layers: 1115 MB on an H100 rather than 1386, with 90 MB of temporary memory
rather than 229; on a v5e 950 MB rather than 1027."""
PACKED_SINGLE_ROWS, PACKED_PANEL_ROWS, PACKED_LOOP = 4, 64, 1 << 23
"""Rows up to which a CPU multiplies them by a packed weight one by one, and by panels; numbers of a weight in one loop,
so that the sums of its blocks stay in the cache."""
PACKED_ADDED_ROWS, PACKED_PRODUCT = 2, 1 << 24
"""Rows up to which CUDA adds up without a product, and numbers of a weight that a product of more rows takes there,
which unpacked to bfloat16 fit the L2 cache of an H100. On a TPU XLA stores no unpacked weight, and pieces would cost
1.4 times the cycles.

2048 x 5632 take an H200, in us, the product in pieces of 2**23:

    rows                                1     8     16
    added up, the weight in registers   16    45    72
    a product, the weight in memory     16    27    31

With 8 rows two layers and a head of 100 MB move 83 MB rather than 309: here bytes are no times.

MB moved, kernels and MB of temporary memory of a gated MLP in bfloat16, counted for an H100 with jax 0.10:

             2048 x 5632: 8 rows    4096 rows       4096 x 14336: 8 rows    4096 rows
    2**23    166, 15, 35            986, 14, 273    849, 58, 35             3415, 46, 520
    2**24    162, 7, 47             504, 7, 115     834, 31, 69             2735, 26, 554
    whole    162, 7, 47             504, 7, 115     825, 8, 121             1654, 7, 352

XLA fuses a single array into an operand of a product: codes of 8 bits, but not with the scales of their blocks. 8 rows
by 1024 x 2816, which is 1.8 MB, move 14.2 MB; with a product for each block, whose sums are scaled, 14.2 too; by halves
of bytes 25.7. Bytes bitcast to int4 end the process of XLA 0.10. A Pallas kernel for Triton moves 2.2 MB, but has no
gradient, is gathered on a mesh, and is rejected by jax.export; jax 0.12 deprecates it, and needs a GPU to lower it."""
PACKED_MANY_ROWS, PACKED_MANY_PRODUCT = 1024, 1 << 27
"""Rows from which a product takes more numbers, since all pieces read the inputs and their results are joined; 268 MB
in bfloat16, where a head of 4096 x 128256 as a whole would hold a GB."""
CUDA_ROWS: Final = 8
"""Rows of the smallest product that XLA leaves to its own kernels of products on CUDA."""
TPU_APPENDED: Final = 64
"""Elements along an axis of images or heads behind which a TPU selects a single one rather than to concatenate it. A
step of GPT-2 with eight caches of 128 tokens moves 663 MB in 4.1 million cycles of a v5e rather than 740 in 5.2."""
SVM_DIFFERENCES: Final = 1 << 17
"""Differences of features below which they are squared and summed one by one: on a v5e 8 rows, 400 vectors and 16
features take 6 thousand cycles rather than 10, but 8 rows, 500 vectors and 64 features 29 rather than 22, and 512 rows
615 rather than 31."""
FOREST_COPIES, FOREST_LEAVES, FOREST_CONDITIONS = 16, 3, 2**26
"""Times the nodes that a layout with copies of shared nodes may have; leaves of a tree for each level of its forest, up
to which a CPU takes masks: LightGBM's trees of 31 leaves take 0.4 of the time of a descent, full trees of depth 4 take
1.3 times as long, on a v5e both a third or less; conditions of all rows up to which accelerators take masks, as a TPU
stores the features that they compare."""

# -------------------------------------------------------------------------------------------------------- passes
# One core of an AMD EPYC (Zen 4) with jax 0.10; what each pass gains: benchmarks/passes.py. Values not re-measured.

INT8_ROWS: Final = 16
"""Rows from which products are in int8: 8 rows by 256 x 1024 take 90 us in float32, in int8 110 where there is no
VNNI."""
TRANSPOSED_WEIGHT: Final = 1 << 24
"""Elements of a weight up to which it is stored transposed. Larger ones are read from memory either way (768 x 32000:
3.7 ms as stored, 4.7 transposed), and would cost a second copy of a decoder's embedding."""
RECOMPUTED: Final = 1 << 14
"""Elements of a value from which it is materialised; for smaller ones it makes no difference."""
UNROLLED_STEPS, UNROLLED_EQUATIONS, UNROLLED_BYTES = 16, 128, 1 << 16
"""Steps of a loop and equations of its body, compiled for each step, up to which it is unrolled, and bytes of its
result from which: XLA does not divide smaller ones among threads."""
MICROBATCH, MICROBATCH_WEIGHTS = 5 << 20, 1 << 26
"""Bytes of the largest value of a microbatch, for each core, up to which batches stay whole, and bytes of weights,
which every microbatch reads, up to which they are split."""
TRAINING_GROUPS, TRAINING_PIXELS, TRAINING_ROWS = 16, 64, 16
"""A network without kernels of so many groups, most of whose weights meet at most so many pixels of a batch, keeps its
layout: its step is bound by the memory of the weights. ResNet-50 over 8 images of 64x64 would take 1.28 times as long.

From so many rows on a sum over them goes by quarters that are added as arrays: XLA:CPU sums along leading axes one
number at a time. 9 sums over 16x16x16 pixels of 128 channels take 0.75 ms rather than 2.8."""

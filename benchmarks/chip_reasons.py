"""Why figures in docs/accelerators.md are above their limits, with what else was tried: by section and chip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

REASONS: Final[Mapping[tuple[str, str], str]] = {
    ("networks", "v5e"): """
- ResNet-50 with 8 images, cycles: weights are [out, in, height, width] in a file. The same kernels with images channels
  last take 1.09 times the cycles by hand too, and 1.12 with products for kernels of one pixel.
- MobileNetV2 with one image, cycles: products for kernels of one pixel take 1.48, depthwise kernels as sums 1.75, both
  1.02, but with 8 images 1.6 times as many as now.
- UNet holds more at a time, also with images channels last or products, and moves 0.3 of the bytes with 8 images.
- BERT as it is: XLA concatenates the weights of query, key and value in every call, `merge_products` once. The rest of
  its temporary memory, and that of ResNet-50 with one image, LSTM, GRU, GPT-2 and SVC, are 0.03 to 1.7 MB.
- ViT with one image moves 2.4 MB more with half the memory.
- The wide convolution with 8 images adds up rows: 4.5 times the bytes in 0.12 of the cycles.
- bfloat16: what is computed in float32 (softmax, normalisations, GELU) is stored between some kernels.
""",
    ("networks", "h100"): """
- ResNet-50, MobileNetV2 and UNet as they are: BatchNormalization follows each convolution. A call of the Model,
  outside of a caller's jit, folds it into the weights: 1.03, 1.00 and 1.11 of the bytes with 8 images, 1.07, 1.00 and
  1.09 with one; in bfloat16 ResNet-50 moves 0.67 of what it does here with 8 images, MobileNetV2 0.84.
- ResNet-50, temporary memory: kernels of one pixel that stride are convolutions. As products they take 1.0, but XLA
  0.10 and 0.11 end the process on gradients of such products.
- BERT as it is: XLA concatenates the weights of query, key and value in every call, `merge_products` once.
- LSTM and GRU with 8 sequences, temporary memory: one more of cuBLAS's workspaces of 4 MB.
- bfloat16: cuBLAS's products are padded, 197 keys or 50257 words to a multiple of 8; XLA's own are not, and store
  partial sums.
""",
    ("training", "h100"): """
- ResNet-50 and MobileNetV2 as they are: the gradient by the parameters of BatchNormalization, which by hand has none.
- ViT and BERT: query, key and value are split by columns, and so are their gradients; by hand one transposition has
  all three. The form of GELU changes nothing: half of its input first, as by hand, gives the same bytes.
""",
    ("files", "v5e"): """
- yolox_nano_int8_qdq rounds to codes three times after each of 113 convolutions, and XLA fuses all of it with them.
  Products by reciprocals instead of divisions compile in 48 s, but have other ties, and 240 MB are moved. Barriers
  before numbers are rounded: 44 s and 708 MB; after codes: 58 s and 452 MB.
""",
}

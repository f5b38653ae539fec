"""onnxruntime-extensions: images in files. Pixels are [height, width, (blue, green, red)]."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np

from ..registry import Static
from ..vision import pillow
from . import contributed

_JPEG = "pixels of JPEG are pillow's, whose chroma is smoother than that of onnxruntime-extensions"


@contributed("DecodeImage", f"PNG and JPEG; needs the extra `image` (pillow); {_JPEG}", extra="image")
def decode_image(image: Static):
    try:
        file = pillow().open(io.BytesIO(np.asarray(image).tobytes()), formats=("PNG", "JPEG"))
        if file.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
            raise NotImplementedError(f"images of the mode {file.mode} are unsupported: convert them to RGB")
        return np.ascontiguousarray(np.asarray(file.convert("RGB"))[..., ::-1])
    except (OSError, SyntaxError) as error:
        raise ValueError(f"the bytes are no PNG or JPEG that pillow decodes ({error})") from None


@contributed(
    "EncodeImage", "needs the extra `image` (pillow); JPEG of quality 95; files decode to the same, bytes differ",
    extra="image",
)  # fmt: skip
def encode_image(image: Static, *, format: Literal["png", "jpg"]):
    file = io.BytesIO()
    options = {"format": "PNG"} if format == "png" else {"format": "JPEG", "quality": 95}
    pillow().fromarray(np.ascontiguousarray(image[..., ::-1])).save(file, **options)
    return np.frombuffer(file.getvalue(), np.uint8).copy()

"""Bytes: the messages of the format, files and external data, tensors to and from NumPy."""

if __name__ != "onnx2jax.proto":
    # Through the link at the top of the repository it would be a second copy of everything.
    raise ImportError(f"import onnx2jax.proto, not {__name__}: the folder proto beside onnx2jax is a link for readers")

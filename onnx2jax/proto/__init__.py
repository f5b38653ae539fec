"""Bytes: the messages of the format, files and external data, tensors to and from NumPy."""

"""The checker: every violation of the ONNX specification in a file, with its location and how to fix it.

The importer stops at the first violation; the checker collects all of them.
"""

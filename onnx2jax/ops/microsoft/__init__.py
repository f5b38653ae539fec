"""The domain com.microsoft: what onnxruntime's optimizers and quantizers write."""

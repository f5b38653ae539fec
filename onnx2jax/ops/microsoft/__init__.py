"""The domain com.microsoft: operators that onnxruntime's optimizers, quantizers and model builders emit."""

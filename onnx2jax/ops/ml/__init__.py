"""The domain ai.onnx.ml: trees, support vectors, linear models, and the features that they are made of."""

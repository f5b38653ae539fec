"""The domain ai.onnx.ml: tree ensembles, support vector machines, linear models and feature encoders."""

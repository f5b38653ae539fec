"""Reports: card, summary, drawing, profile, paths of calls, comparison with other implementations of ONNX."""

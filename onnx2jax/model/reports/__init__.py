"""What a model shows of itself: its card, its summary, its drawing, its profile.

And how it compares with other implementations of ONNX, on inputs that come with the file or are drawn.
"""

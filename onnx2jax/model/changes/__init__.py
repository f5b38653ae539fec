"""Other graphs made from a model's own: for other batch sizes, with fixed sizes where data decides, a part of it.

And with its weights unpacked, or with some values on detours.
"""

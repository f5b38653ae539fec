"""What a user holds: a file becomes a Model, a Model is called with arguments, and goes back into a file.

A Model is a graph with its parameters; everything about running it is asked of the rooms below. Here lie ``convert``,
the Model (``model``, ``views``) and its weights; the rest lies in rooms, each of which imports only those above it:

- ``calls``: what goes in and comes out of one call.
- ``changes``: other graphs made from a model's own.
- ``files``: models written, joined, exported and loaded again.
- ``reports``: what a model shows of itself, and what it is compared with.
- ``devices``: models in stages on several devices, and what that costs.
"""

"""``convert``, the Model, its spec, runtime and parameters.

The packages inside, each of which imports only those above it:

- ``calls``: arguments and outputs of a call.
- ``changes``: models with changed graphs.
- ``files``: saving, joining, exporting and loading models.
- ``reports``: summaries, drawings, profiles and comparisons.
- ``devices``: pipeline stages on several devices, and their cost.
"""

"""The graph IR: protobuf messages as frozen, validated Python objects, each node bound to its implementation.

Nothing here evaluates a node; graph analyses (topological order, ancestors, values that must be known) are here.

- ``file``, ``importer``: from a file to a graph, with the help of ``binding``, ``attributes``, ``rules`` and
  ``training_info``.
- ``graph``: the data structures; ``analysis``, ``patterns``, ``loops``, ``layers``, ``derivatives``, ``fingerprint``:
  analyses of them.
- ``signatures``: the types that each version of each operator accepts.
- ``precision``, ``casts``: which values a model computed in bfloat16 or float16 keeps in float32.
- ``widening``: the casts of a model computed in float64.
"""

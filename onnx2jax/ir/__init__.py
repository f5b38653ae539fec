"""Graphs: a file's messages as frozen Python objects, each node bound to what serves it, the format's rules kept.

Nothing here computes; what a graph says about itself (its order, its ancestors, what must be known) is found here.

- ``file``, ``importer``: from a file to a graph, with the help of ``binding``, ``attributes``, ``rules``, ``metadata``
  and ``training_info``.
- ``graph``: what it is; ``analysis``, ``derivatives``, ``fingerprint``: what is asked of it.
- ``signatures``: the types that each version of each operator takes.
"""

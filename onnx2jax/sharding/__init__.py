"""Placement on several devices: a user's rules by name, plans derived from the graph, or a file's configurations.

All become NamedShardings over one mesh, and never change results.

- ``rules``: ``Placement``, the base of all placements.
- ``plans``: by a user's rules over names, or derived from the graph: by ``propagation`` over its nodes, with
  ``node_rules``.
- ``configurations``: the file's own, over a mesh (``mesh_layout``); ``constraints`` on values of nodes, ``writing``
  into a file.
- ``stages``: pipeline stages, each on its own devices.
- ``put``, ``processes``: arrays to devices, multi-process programs.
"""

"""Where arrays lie on many devices: a user's rules by name, plans from the graph, the device configurations of a file.

All end as NamedShardings over one mesh; the values that are computed stay the same.

- ``rules``: a user's, by name; what all placements have in common.
- ``plans``: found in the graph, by ``walk`` over its nodes with ``products``, ``tensor``, ``heads`` and ``shapes``.
- ``configurations``: the file's own, on the devices of ``mesh``; ``constraints`` at nodes, ``writing`` into a file.
- ``stages``: one model on several groups of devices.
- ``put``, ``processes``, ``collectives``: arrays onto devices, several processes, what devices send each other.
"""

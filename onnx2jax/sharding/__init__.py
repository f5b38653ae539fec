"""Where arrays lie on many devices: a user's rules by name, plans from the graph, the device configurations of a file.

All end as NamedShardings over one mesh; the values that are computed stay the same.
"""

"""Running a graph: the one evaluation loop, where a graph is cut, and what is compiled of it.

It knows no operator by name: what one needs it says in its signature.
"""

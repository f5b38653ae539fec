"""Graphs: a file's messages as frozen Python objects, each node bound to what serves it, the format's rules kept.

Nothing here computes; what a graph says about itself (its order, its ancestors, what must be known) is found here.
"""

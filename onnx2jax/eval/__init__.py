"""Evaluating a graph: the one loop over nodes, with values that are known (NumPy), traced (JAX) or abstract.

``interpreter`` evaluates nodes in order; ``autodiff_tape`` runs nodes that ask for derivatives, ``static_operands``
finds what operators must know, ``layers`` and ``sibling_fusion`` put one node in the place of several, ``node_errors``
explains what fails, ``values`` converts to NumPy and to JAX. ``abstract`` and ``known_values`` evaluate without data.

It knows no operator by name.
"""

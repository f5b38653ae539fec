"""Passes between trace and XLA: from one jaxpr to another, where a concrete call is compiled for a CPU.

A caller's own transformations, symbolic export, meshes and other platforms keep the plain jaxpr.
``convert(optimize=False)`` switches them off.
"""

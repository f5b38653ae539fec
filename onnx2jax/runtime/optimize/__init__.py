"""Passes between trace and XLA: from one jaxpr to another, where a concrete call is compiled for a CPU.

In their order: ``integers`` computes products of dequantised integers in integers, and has ``tables`` take maxima of
such integers themselves; ``layout`` puts channels last, lets ``fold`` put scales behind convolutions into their
weights, and hands convolutions to ``convolution``, which knows the fastest way for each shape; ``rows`` turns weights
that one row is multiplied by; ``prepare`` takes out what weights alone decide, which ``on_numpy`` computes once;
``vnni`` hands products of int8 to faster kernels; ``once`` has XLA keep what several equations read, and ``images``
takes large batches some at a time. ``executable`` runs what is left; NumPy does where that is ``small``.

``step`` does the like for a step of training, in which no weight stays as it is: ``layout`` asks ``gradients`` how
convolutions go forward and backward, and ``products`` turns those round that are read transposed.

A caller's own transformations, symbolic export, meshes and other platforms keep the plain jaxpr.
``convert(optimize=False)`` switches the passes off.
"""

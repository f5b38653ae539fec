"""What happens between trace and XLA: passes over a program, most of them for CPUs alone.

``pipeline`` lists the passes in order and runs them; ``jaxpr_rewrite`` has the programs that they rewrite, and is the
only module that reads and builds jaxprs. A pass is a module: ``dequantize``, ``fold_batchnorm``, ``layout_assignment``
(with ``axis_orders``, ``conv_lowering`` and ``train_conv``), ``dot_layout``, ``onednn``, ``hoist_params`` (with
``const_eval``), ``prevent_recompute`` and ``microbatch``. ``train_step`` runs those for a training step.
``conv_library`` chooses XLA's library for convolutions.

``numpy_executor`` and ``inline_dispatch`` run tiny and short programs for callers who want NumPy arrays.

A caller's own transformations, symbolic export and meshes keep the plain jaxpr. ``convert(optimize=False)`` switches
all passes off, ``convert(optimize={"skip": [...]})`` some of them.
"""

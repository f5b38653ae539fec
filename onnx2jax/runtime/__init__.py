"""Running a graph, in four steps: interpret, partition, compile, dispatch.

- ``interpreter`` evaluates nodes in order; ``autodiff_tape`` runs nodes that ask for derivatives, ``node_errors``
  explains what fails, ``values`` converts to NumPy and to JAX.
- ``partition`` splits a graph into compiled subprograms and host nodes; ``host_plan`` replays the host nodes.
- ``compile`` traces a subprogram and specialises it on values it needs; ``cpu`` has the passes between trace and XLA,
  ``executable`` one optimised program, ``program_cache`` programs on disk, ``params`` the parameters on their devices.
- ``dispatch`` has ``Signature``, the one key from a call to its compiled program.
- ``mesh_mode`` and ``multi_device_jit`` call programs over several devices; ``limits`` has measured thresholds,
  ``debug`` prints what ONNX2JAX_DEBUG asks for.

The runtime knows no operator by name.
"""

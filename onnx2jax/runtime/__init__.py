"""Running a graph: partition, compile, dispatch.

- ``partition`` splits a graph into compiled subprograms and host nodes, ``host_plan`` replays the host nodes, and
  ``untraceable`` has the errors of callers who transform what cannot be one program.
- ``compile`` traces a subprogram and specialises it on values it needs, and compiles several side by side;
  ``executable`` is one optimised program, ``sections`` several in a row, of which repeated layers share one; ``params``
  has the parameters on their devices.
- ``program_cache`` has programs on disk: by their graphs, or by what they are lowered to (``jitted.PersistentJit``).
- ``dispatch`` has ``Signature``, the one key from a call to its compiled program.
- ``numpy_executor`` and ``inline_dispatch`` run tiny and short programs for callers who want NumPy arrays.
- ``jitted`` and ``multi_device_jit`` call programs over several devices.

The runtime knows no operator by name.
"""

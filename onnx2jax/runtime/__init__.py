"""Running a graph: the one evaluation loop, where a graph is cut, and what is compiled of it.

It knows no operator by name: what one needs it says in its signature.

- ``evaluate``: the loop over nodes; ``tape`` for derivatives that nodes ask for, ``explained`` for what goes wrong.
- ``program``: a graph as one compiled function or in parts, cut by ``partition``; ``compiled``: each of them.
- ``optimize``: what a trace becomes before XLA compiles it; ``store``: what was compiled, in a folder.
- ``jit``, ``spread``: how compiled functions are called; ``values``: to the host and to the device.
"""

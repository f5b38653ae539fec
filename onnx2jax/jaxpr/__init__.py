"""What happens between trace and XLA: programs as JAX has them, and passes over them.

``program`` has the programs that passes rewrite, and is the only module that reads and builds jaxprs; ``pipeline``
lists the passes in order and runs them. A pass is a module of ``passes``: those for any platform in ``any``, those for
CPUs in ``cpu``. ``const_eval`` evaluates equations in NumPy, ``axis_orders`` names the orders of axes that layouts
choose from.

A caller's own transformations, symbolic export and meshes keep the plain jaxpr. ``convert(optimize=False)`` switches
all passes off, ``convert(optimize={"skip": [...]})`` some of them.
"""

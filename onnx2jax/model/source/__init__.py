"""A model as the source of a Python module: ``Model.source``, ``Model.to_source``."""

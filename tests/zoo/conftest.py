"""Where onnxscript is not installed, its sources cannot be imported, not even to look for doctests."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("onnxscript") else ["onnxscript_sources.py"]

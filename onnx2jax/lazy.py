"""Public names of a package, whose modules are imported at first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def exports(
    package: str, modules: Mapping[str, str], inner: Sequence[str] = (), classes: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Args:
        package: its name.
        modules: where each public name is defined, relative to the package.
        inner: public modules of the package, in which an unknown name is looked for, to say where it is.
        classes: public names in whose attributes it is looked for, too.
    """
    namespace = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name in modules:
            value = namespace[name] = getattr(import_module(f"{package}.{modules[name]}"), name)
            return value
        if not name.startswith("_") and find_spec(f"{package}.{name}"):
            return import_module(f"{package}.{name}")
        public = () if name.startswith("_") else (import_module(f"{package}.{module}") for module in inner)
        where = next((f"; it is in {m.__name__}" for m in public if hasattr(m, name)), "")
        holder = next((c for c in classes if not (where or name.startswith("_")) and hasattr(find(c), name)), None)
        where = f"; a {holder} has it: {holder.lower()}.{name}" if holder else where
        raise AttributeError(f"module {package!r} has no attribute {name!r}{where}")

    return find, lambda: sorted({*namespace, *namespace["__all__"]})

"""Results that show themselves as their text: at a prompt as when printed, and in a notebook without wrapped lines."""

from __future__ import annotations

from html import escape


class Printed:
    """A result with ``__str__``. A dataclass needs ``repr=False``, which would define its own."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre style='white-space:pre;overflow-x:auto'>{escape(str(self))}</pre>"

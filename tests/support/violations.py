"""Many cases in one test: every one that fails is named, not only the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def every_case() -> Iterator[Callable[[Any], AbstractContextManager[None]]]:
    """A scope in which ``with case(name):`` notes a failed assertion; at its end, all that were noted are raised."""
    found: list[str] = []

    @contextmanager
    def case(name: Any) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            found.append(f"{name}: {error}")

    yield case
    assert not found, "\n".join(found)

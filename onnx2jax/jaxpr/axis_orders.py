"""Values in one or several axis orders, for layout assignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

Order = tuple[int, ...]
"""``order[i]`` is the traced axis that is now the i-th."""


class OrderedArray:
    """An array of the program, in the axis orders in which it exists.

    Attributes:
        aval: its type as it was traced.
        order: that in which it was computed.
        known: whether it depends on parameters only.
        stays: whether elementwise results of it keep the traced order.
        lazy: whether it is materialised in each order that a consumer asks for, at no cost.
    """

    def __init__(
        self,
        form: Any,
        order: Order | None = None,
        *,
        aval: Any = None,
        known: bool = False,
        stays: bool = False,
        make: Callable[[Order], Any] | None = None,
    ) -> None:
        """``form`` is the array; None for a lazy one, which ``make`` materialises."""
        self.aval = jax.typeof(form) if aval is None else aval
        self.order = plain(self.rank) if order is None else order
        self.known, self.stays, self.lazy = known, stays, make is not None
        self._make = make
        self._forms: dict[Order, Any] = {} if form is None else {self.order: form}

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def rank(self) -> int:
        return len(self.shape)

    def best(self) -> Any:
        """The array in the order of its computation."""
        return self.within(self.order)

    def plain(self) -> Any:
        """The array in the traced order."""
        return self.within(plain(self.rank))

    def within(self, order: Order) -> Any:
        """The array in an axis order, transposed if there is none."""
        if order not in self._forms:
            if self._make is not None:
                self._forms[order] = self._make(order)
            else:
                self._forms[order] = lax.transpose(self._forms[self.order], places(order, self.order))
        return self._forms[order]

    def renamed(self, names: Sequence[int], aval: Any) -> OrderedArray:
        """The value whose axis ``i`` is this one's axis ``names[i]``."""
        make = (lambda order: self.within(permuted(names, order))) if self.lazy else None
        new = OrderedArray(None, places(self.order, names), aval=aval, known=self.known, make=make)
        new._forms = {places(order, names): form for order, form in self._forms.items()}
        return new


def plain(rank: int) -> Order:
    """The traced order."""
    return tuple(range(rank))


def permuted(entries: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """The entries of axes, in an axis order."""
    return tuple(entries[axis] for axis in order)


def places(axes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The positions of axes in an order."""
    return tuple(order.index(axis) for axis in axes)


def without(order: Sequence[int], axes: Sequence[int]) -> Order:
    """The order of the axes that remain without some, renumbered."""
    left = [axis for axis in order if axis not in axes]
    return places(left, sorted(left))

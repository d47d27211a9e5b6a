"""What converts a value of a decorated function, looked up by the type of the value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

from arraybridge.arrays import LEAF, TREE, kinds
from arraybridge.conversion import plans
from arraybridge.conversion.convert import convert_memory
from arraybridge.conversion.plans import by_form
from arraybridge.frameworks.parts import itself
from arraybridge.trees import map_arrays
from arraybridge.types import Cache

#: What changes one array, or all arrays of a value.
Change = Callable[[Any], Any]


class ByType(dict[type, Change]):
    """Type of a value → what changes the arrays in such a value; filled as values come.

    Args:
        change: changes an array that has no plan, or needs care.
        form: where the plans of such arrays are.
        unmark: what is done to a value before it is looked through.
        also: the type of leaves that are changed as arrays are.
    """

    def __init__(
        self, change: Change, form: Hashable, unmark: Change, also: type | tuple[type, ...] = ()
    ) -> None:
        self.form, self.unmark, self.also = form, unmark, also

        def convert(x: Any) -> Any:
            try:
                return by_form[form][type(x)](x)
            except plans.declined:
                return change(x)

        self.convert = convert

    def __missing__(self, cls: type) -> Change:
        return self._at_first_sight

    def _at_first_sight(self, value: Any) -> Any:
        result, cls, kind = self._looked_through(value), type(value), kinds.get(type(value))
        if kind:  # else each value of the class is looked at anew
            if len(self) >= Cache.MOST:
                self.clear()
            stays = by_form.get(self.form, {}).get(cls) is itself or kind == LEAF
            entry = self._looked_through if kind == TREE else itself if stays else self.convert
            self[cls] = self.convert if isinstance(value, self.also) else entry
        return result

    def _looked_through(self, value: Any) -> Any:
        return map_arrays(self.unmark(value), self.convert, also=self.also)


def careful(change: Change, unmark: Change) -> dict[type, Change]:
    """The same for one call, in which each value is looked through and each array changed."""
    return defaultdict(lambda: lambda value: map_arrays(unmark(value), change))


@cache
def shared(make: Callable[..., ByType], *options: Hashable) -> ByType:
    """One for all decorators with the same options; it forgets its types when frameworks come or go."""
    by_type = make(*options)
    Cache.every.append(by_type)
    return by_type


def conversion(
    target: str, declared: str | None, grad: Any, dtype: str | None = None, device: str | None = None
) -> tuple[Change, Hashable]:
    """What converts one array as `convert_memory` does, and the form of its plans."""
    options: dict[str, Any] = {}
    if grad != "error" or dtype is not None or device is not None:
        options = {"grad": grad, "dtype": dtype, "device": device}
    elif declared is None:
        return lambda x: convert_memory(x, target), target
    form = (declared, target, *options.items(), *map(type, options.values()))
    return lambda x: convert_memory(x, declared, target, **options), form

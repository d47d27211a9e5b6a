"""`Call`: the arguments of a call to a `gpu` function, with their arrays, size and call signature."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from hashlib import blake2b
from types import EllipsisType, NoneType
from typing import Any

import numpy as np

from arraybridge.caches import exact_key
from arraybridge.carriers.sources import source_of
from arraybridge.conversion.convert import convert_memory
from arraybridge.host.dtype_names import PLAIN
from arraybridge.trees import ARRAY, key_of, kind_of, leaves_of, map_arrays

#: The maximum number of arrays and other values in a signature. Each call visits them all.
MAX_VALUES = 1000
#: Longer strings are represented by a digest, so that a signature stays small.
_LONG = 256

_TEXTS = (str, bytes)
# Numbers, and small objects that do not change and cannot be referenced weakly.
_VALUES = (int, float, complex, np.generic, NoneType, EllipsisType, range, np.dtype, np.ufunc, type(np.sum))


class Call:
    """The arguments of a call.

    Attributes:
        own: ``self`` or ``cls``, which is never converted, or nothing.
        args: The other positional arguments.
        kwargs: The keyword arguments.
        arrays: The arrays in ``args`` and ``kwargs``.
        nbytes: Their total size.
        in_numpy: Whether all of them are NumPy arrays.
        has_sparse: Whether one of them is sparse.
        signature: The call signature, whose first item represents ``self``. Calls have equal signatures if
            their arrays have the same dtypes and ranks and about the same size, if their numbers and strings
            are equal, and if all other objects are the same.
        no_signature_reason: The reason why the signature cannot be compared with others, or "".
    """

    def __init__(self, own: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.own = own
        self.args = args
        self.kwargs = kwargs

    def inspect(self) -> Call:
        """Set the attributes that describe the arguments, and return ``self``."""
        self.arrays: list[Any] = []
        self.nbytes = 0
        self.in_numpy = True
        self.has_sparse = False
        self.no_signature_reason = ""
        own = tuple([self._key_of_value(x) for x in self.own]) if self.own else ()
        keys: list[Any] = [tuple(self.kwargs)]
        values: Any = (*self.args, *self.kwargs.values()) if self.kwargs else self.args
        if [x for x in values if type(x) is not np.ndarray]:
            keys += self._inspect_others(values)
        else:  # in most calls
            self.arrays += values
            for x in values:
                keys.append((x.dtype, x.ndim))
                self.nbytes += x.nbytes
        self.signature = own, self.nbytes.bit_length(), *keys
        return self

    def _inspect_others(self, values: tuple[Any, ...]) -> list[Any]:
        """Inspect arguments that are not all NumPy arrays, and return their keys."""
        leaves = leaves_of(values)
        structure = tuple(map(key_of, values))
        keys = [structure] if any(structure) else []
        if len(leaves) > MAX_VALUES:
            self.no_signature_reason = f"its arguments contain more than {MAX_VALUES} values"
        for x in leaves:
            if type(x) is np.ndarray:
                keys.append((x.dtype, x.ndim))
                self.nbytes += x.nbytes
                self.arrays.append(x)
            elif kind_of(x) is ARRAY:
                keys.append(self._inspect_array(x))
            elif not self.no_signature_reason:
                keys.append(self._key_of_value(x))
        try:
            hash(tuple(keys))
        except TypeError as error:
            self.no_signature_reason = f"its arguments cannot be compared between calls ({error})"
        return keys

    def _inspect_array(self, x: Any) -> tuple[Any, ...]:
        """Add an array that is not a plain NumPy array to the totals, and return its key."""
        owner, data = source_of(x)
        self.arrays.append(x)
        self.nbytes += owner.nbytes(data)
        self.in_numpy = False
        self.has_sparse = self.has_sparse or bool(owner.sparse.layout(data))
        name = owner.dtype_name(data)
        key = np.dtype(name) if name in PLAIN else name, len(owner.shape(data))
        if isinstance(x, np.ndarray):  # subclasses may override operators, as np.matrix does
            return *key, type(x)
        # JAX promotes weakly typed arrays like Python numbers.
        return (*key, "weak") if getattr(data, "weak_type", False) else key

    def _key_of_value(self, x: Any) -> Any:
        """Return the key of a value that is not an array; None if it cannot be compared between calls."""
        key = _key_of(x)
        if key is None:
            self.no_signature_reason = (
                f"an argument of type {type(x).__qualname__} cannot be compared between calls"
            )
        return key

    def map(self, convert: Callable[[Any], Any]) -> Call:
        """Return the arguments with each array replaced by ``convert(array)``."""
        args = tuple([map_arrays(x, convert) for x in self.args])
        return Call(self.own, args, {name: map_arrays(x, convert) for name, x in self.kwargs.items()})

    def on_host(self) -> Call:
        """Return the arguments with each array converted to NumPy."""
        return self if self.in_numpy else self.map(lambda x: convert_memory(x, "numpy"))

    def run(self, fn: Callable[..., Any]) -> Any:
        """Call ``fn`` with these arguments."""
        return fn(*self.own, *self.args, **self.kwargs)


def _key_of(x: Any) -> Any:
    """Return the key of a value that is not an array; None if it cannot be compared between calls."""
    cls = type(x)  # not isinstance, because `__class__` of an object may raise
    if cls in _TEXTS and len(x) > _LONG:
        data = x.encode("utf-8", "surrogatepass") if cls is str else x
        return cls, len(x), blake2b(data).digest()
    if issubclass(cls, (*_TEXTS, *_VALUES)):
        return exact_key(x)
    if cls is slice:
        keys = [_key_of(bound) for bound in (x.start, x.stop, x.step)]
        return None if None in keys else (slice, *keys)
    try:
        return _Identity(x)
    except TypeError:  # objects of some classes in C, and of classes with slots
        return None


class _Identity:
    """An object as a dictionary key, compared by identity and not kept alive.

    Once the object is deleted, the key differs from all others, because a new object may have its address.

    Raises:
        TypeError: If the object cannot be referenced weakly.
    """

    __slots__ = ("_id", "_reference")

    def __init__(self, x: Any) -> None:
        self._reference = weakref.ref(x)
        self._id = id(x)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity):
            return NotImplemented
        x = self._reference()
        return self is other or (x is not None and x is other._reference())

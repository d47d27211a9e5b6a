"""Signatures of calls: calls with equal signatures differ only in the shapes and values of their arrays."""

from __future__ import annotations

import inspect
import struct
import weakref
from collections import deque
from collections.abc import Hashable, Iterable
from contextlib import suppress
from enum import Enum
from functools import partial
from hashlib import blake2b
from types import (
    BuiltinFunctionType,
    CodeType,
    EllipsisType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import numpy as np

from arraybridge.carriers.sources import source_of
from arraybridge.trees import ARRAY, TREE, kind_of, leaves_of

#: The maximum number of objects in a signature, including arrays and containers. Each call visits them all.
MAX_VALUES = 1000
#: Longer strings are represented by a digest, so that a signature stays small.
_LONG = 256

_SINGLE = (int, bool, NoneType, EllipsisType)
#: Classes written in Python have this flag (Py_TPFLAGS_HEAPTYPE), and so do some written in C.
_HEAP_TYPE = 1 << 9
_BUILT_IN = (dict, list, tuple, set, frozenset, deque)


class NoSignatureError(Exception):
    """An error for arguments that have no exact signature. The message is the reason."""


class _Identity:
    """An object as a dictionary key, compared by identity and not kept alive."""

    __slots__ = ("_number", "_reference")

    def __init__(self, x: Any) -> None:
        try:
            self._reference = weakref.ref(x)
        except TypeError:
            raise NoSignatureError(
                f"an argument of type {type(x).__qualname__} cannot be compared between calls"
            ) from None
        self._number = id(x)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # A dead reference is not equal to any other, because its address may belong to a new object.
        mine = self._reference()
        return isinstance(other, _Identity) and mine is not None and mine is other._reference()


class _Walk:
    """One pass over the arguments of a call."""

    def __init__(self) -> None:
        self._count = 0
        # Maps the id of each object that is being described to its depth. Recursion ends at these objects.
        self._open: dict[int, int] = {}

    def value(self, x: Any) -> Hashable:
        """Return a key that is equal for two values only if functions cannot distinguish them.

        Arrays are the exception: they are compared by type, dtype and rank, not by shape or value.
        """
        self._count += 1
        if self._count > MAX_VALUES:
            raise NoSignatureError(f"its arguments contain more than {MAX_VALUES} objects")
        cls = type(x)
        if cls is np.ndarray:
            return _array(x)
        if cls is list or cls is tuple:
            return self._nested(x)
        if cls in _SINGLE or issubclass(cls, np.dtype):
            return cls, x
        if cls in (str, bytes):
            return cls, _text(x)
        if cls in (float, complex):  # as bits, because 0.0 == -0.0 and NaN != NaN
            return cls, struct.pack("2d", x.real, x.imag)
        return self._other(x)

    def _other(self, x: Any) -> Hashable:
        """Return the key of a value whose class `value` does not handle itself."""
        cls = type(x)
        if issubclass(type(x), np.generic):
            return cls, x.dtype, _text(x.tobytes()) if not x.dtype.hasobject else _Identity(x)
        if kind_of(x) is ARRAY:
            return _array(x)
        if issubclass(type(x), Enum):
            return cls, self.value(x._value_)
        if issubclass(type(x), (type, ModuleType, BuiltinFunctionType)):
            return _Identity(x)
        return self._nested(x)

    def values(self, xs: Iterable[Any]) -> tuple[Hashable, ...]:
        """Return the keys of several values."""
        return tuple([self.value(x) for x in xs])

    def _nested(self, x: Any) -> Hashable:
        """Return the key of an object that consists of other objects."""
        depth = self._open.get(id(x))
        if depth is not None:
            return "cycle", depth
        self._open[id(x)] = len(self._open)
        try:
            return type(x), *self._parts(x)
        except RecursionError:
            raise NoSignatureError("its arguments are nested too deeply") from None
        finally:
            del self._open[id(x)]

    def _parts(self, x: Any) -> tuple[Hashable, ...]:
        if type(x) in _BUILT_IN:
            return self._items(x)
        if issubclass(type(x), FunctionType):
            # A lambda expression creates a new function each time, with the same code.
            return x.__code__, self.values((x.__defaults__, x.__kwdefaults__)), self.values(_captured(x))
        if issubclass(type(x), MethodType):
            return self.values((x.__func__, x.__self__))
        if issubclass(type(x), partial):
            return self.values((x.func, x.args, x.keywords))
        parts = self._items(x)
        attributes = _attributes(x)
        if not parts and (not attributes or _has_native_state(type(x))):
            parts = self.values(leaves_of(x)) if kind_of(x) is TREE else self._reduced(x)
        return (*parts, self.value(attributes))

    def _items(self, x: Any) -> tuple[Hashable, ...]:
        """Return the keys of the items of a built-in container or its subclass; ``()`` for other objects."""
        if issubclass(type(x), dict):
            keys = tuple(dict.keys(x)) if all(type(key) is str for key in x) else self.values(dict.keys(x))
            return keys, self.values(dict.values(x))
        if issubclass(type(x), (set, frozenset)):
            return (frozenset(map(self.value, x)),)
        if issubclass(type(x), (list, tuple)):
            return (self.values(x),)
        if issubclass(type(x), deque):
            return self.values(x), x.maxlen
        return ()

    def _reduced(self, x: Any) -> tuple[Hashable, ...]:
        """Return the keys of an object's pickle state, or its identity if it cannot be pickled."""
        try:
            reduced = x.__reduce_ex__(4)
        except Exception:  # noqa: BLE001  # `__reduce_ex__` may raise anything; use the identity
            return (_Identity(x),)
        return (reduced,) if isinstance(reduced, str) else self.values(reduced[1:3])


def _has_native_state(cls: type) -> bool:
    """Return whether instances store more than attributes, as those of ``random.Random`` do."""
    return any(not base.__flags__ & _HEAP_TYPE or _is_larger(base) for base in cls.__mro__[:-1])


def _is_larger(cls: type) -> bool:
    """Return whether instances have memory other than slots, ``__dict__`` and ``__weakref__``."""
    members = vars(cls)
    words = sum(isinstance(member, MemberDescriptorType) for member in members.values())
    words += ("__dict__" in members) + ("__weakref__" in members)
    parent = max(base.__basicsize__ for base in cls.__bases__)
    return cls.__basicsize__ > parent + words * struct.calcsize("P")


def _text(x: Any) -> Hashable:
    if len(x) <= _LONG:
        return x  # type: ignore[no-any-return]
    data = x.encode("utf-8", "surrogatepass") if isinstance(x, str) else x
    return len(x), blake2b(data).digest()


def _array(x: Any) -> Hashable:
    if type(x) is np.ndarray:
        return "array", x.dtype, x.ndim, ""
    owner, data = source_of(x)
    key = "array", np.dtype(owner.dtype_name(data)), len(owner.shape(data))
    if isinstance(x, np.ndarray):  # subclasses may override operators, as np.matrix does
        return *key, type(x)
    # JAX promotes weakly typed arrays like Python numbers.
    return *key, "weak" if getattr(data, "weak_type", False) else ""


def _captured(fn: FunctionType) -> list[Any]:
    """Return the values of captured variables, with a placeholder for unassigned ones."""
    captured = []
    for cell in fn.__closure__ or ():
        try:
            captured.append(cell.cell_contents)
        except ValueError:
            captured.append(_Identity)  # no variable has this private class as its value
    return captured


def _attributes(x: Any) -> dict[str, Any]:
    """Return the attributes that an object stores, by name, without running the object's own code."""
    attributes: dict[str, Any] = {}
    for cls in type(x).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType) and cls.__flags__ & _HEAP_TYPE:  # from __slots__
                with suppress(AttributeError):  # the slot is not assigned
                    attributes[name] = member.__get__(x)
    try:
        stored = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return attributes
    return attributes | dict(stored)


def signature_of(values: Any) -> Hashable:
    """Return the exact signature of nested arguments.

    Raises:
        NoSignatureError: If an argument cannot be described.
    """
    return _Walk().value(values)


def names_in(fn: Any) -> tuple[str, ...]:
    """Return the names of attributes and globals in the code of a function, sorted."""
    return tuple(sorted(_names(getattr(inspect.unwrap(fn), "__code__", None))))


def _names(code: Any) -> set[str]:
    if not isinstance(code, CodeType):
        return set()
    return set(code.co_names).union(*map(_names, code.co_consts))  # including nested functions


def signature_of_self(own: tuple[Any, ...], names: tuple[str, ...]) -> Hashable:
    """Return the signature of ``self``: its type, and the exact values of plain attributes with these names.

    Other attributes are ignored, so that a counter, cache or log does not change the signature.
    """
    signature: list[Hashable] = []
    for one in own:
        attributes = {} if kind_of(one) is ARRAY else _attributes(one)
        plain = [(name, attributes[name]) for name in names if _is_plain(attributes.get(name, _Identity))]
        signature.append((type(one), signature_of(plain)))
    return tuple(signature)


def _is_plain(x: Any) -> bool:
    plain = (*_SINGLE, str, bytes, float, complex)
    return type(x) in plain or issubclass(type(x), (np.generic, Enum))

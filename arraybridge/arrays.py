"""What is an array, what is a container to look into, and what is neither; and whose an array is."""

from __future__ import annotations

import dataclasses
import mmap
from collections import OrderedDict, UserDict, defaultdict, deque
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import carrier_of
from arraybridge.carriers.carrier import opened as opened_carrier
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.frameworks.foreign import foreign_framework, is_foreign_array, offers_alone, unknown_array
from arraybridge.types import Cache

__all__ = [
    "ARRAY",
    "BUILT_IN",
    "LEAF",
    "OPTREE",
    "TREE",
    "is_array",
    "is_carrier",
    "is_registered",
    "kind_of",
    "kinds",
    "source_of",
]

#: What a value is: no array and no container, an array, or a container to look into.
LEAF, ARRAY, TREE = 1, 2, 3
# Each value of the class is looked at anew: it may be registered with optree at any time, or have a protocol
# of its own.
_OPEN = 0

_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), slice, range),
    *(FunctionType, BuiltinFunctionType, MethodType),
)
BUILT_IN = (dict, list, tuple, OrderedDict, defaultdict, deque)
_BASES = (dict, list, tuple, deque, UserDict, SimpleNamespace)
# Classes may be registered with optree for arraybridge alone.
OPTREE: dict[str, Any] = {"none_is_leaf": True, "namespace": "arraybridge"}

#: Type → what its values are. Where every microsecond counts, ``kinds.get(type(x)) or kind_of(x)``.
kinds: Cache[type, int] = Cache()


def kind_of(value: Any) -> int:
    """`LEAF`, `ARRAY` or `TREE`."""
    cls = type(value)
    kind = kinds.get(cls)
    if kind is None:
        kind = kinds.keep(cls, _kind_of_class(value))
    if kind != _OPEN:
        return kind
    if is_carrier(value):  # first, since zarr's arrays are dataclasses
        return ARRAY
    return TREE if _is_container(value) else ARRAY if offers_alone(value) else LEAF


def _kind_of_class(value: Any) -> int:
    cls = type(value)
    if cls in _PLAIN or isinstance(value, (np.generic, type)):
        return LEAF
    if cls in BUILT_IN:
        return TREE
    if registry.find_owner(value) is not None:
        return ARRAY
    if carrier_of(value) is not None:
        return _OPEN
    if is_foreign_array(value) and not offers_alone(value):
        return ARRAY
    return TREE if _is_container(value) else _OPEN


def is_carrier(value: Any) -> bool:
    """Whether it counts as an array because it carries one.

    Bytes do not, among other things; they carry one where they are named as the array to convert.
    """
    return not isinstance(value, (bytes, bytearray, mmap.mmap)) and carrier_of(value) is not None


def _is_container(x: Any) -> bool:
    return isinstance(x, _BASES) or dataclasses.is_dataclass(x) or is_registered(x)


def is_registered(x: Any) -> bool:
    """Whether optree looks into it: a named tuple, a structseq, or of a class that is registered by now."""
    import optree

    return not optree.tree_is_leaf(x, **OPTREE)


def is_array(x: Any) -> bool:
    """Whether ``x`` is an array that can be a source."""
    return registry.find_owner(x) is not None or carrier_of(x) is not None or is_foreign_array(x)


def source_of(x: Any) -> tuple[Framework, Any]:
    """The framework of an array, and the array to read (foreign CUDA arrays are imported first).

    Raises:
        UnknownArrayError: it is no array.
    """
    owner = registry.find_owner(x)
    if owner is not None:
        return owner, x
    carrier = carrier_of(x)
    if carrier is not None:
        owner, array = opened_carrier(carrier, x)
        return source_of(array) if owner is None else (owner, array)
    if not is_foreign_array(x):
        raise unknown_array(x)
    return foreign_framework(x)

"""Finding the arrays among a function's arguments and results, in containers too."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np

from arraybridge.conversion import trace
from arraybridge.conversion.convert import Grad, convert_memory, is_array
from arraybridge.conversion.decide import Request, find_source
from arraybridge.errors import MemoryConversionError
from arraybridge.frameworks import registry
from arraybridge.frameworks.base import Framework
from arraybridge.types import DeviceLike, GpuId

__all__ = [
    "ARRAY",
    "LEAF",
    "TREE",
    "convert",
    "kind_of",
    "kinds",
    "map_arrays",
    "map_together",
    "prefix",
    "source_of",
]

#: What a value is: no array and no container, an array, or a container to look into.
LEAF, ARRAY, TREE = 1, 2, 3

#: Namespace of the classes that are registered with optree for arraybridge alone.
NAMESPACE = "arraybridge"

_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), slice, range),
    *(FunctionType, BuiltinFunctionType, MethodType),
)
_CONTAINERS = (dict, list, tuple, OrderedDict, defaultdict, deque)

#: Type → what its values are; filled by `kind_of`, which is asked for the first value of a type.
kinds: dict[type, int] = {}
_MAX_TYPES = 512

#: Type → the framework that owns its values, where one does, and its name, "" where none does.
_owners: dict[type, Framework] = {}
_names: dict[type, str] = {}

# A framework that is added may own what was no array before.
registry.on_register.append(kinds.clear)
registry.on_register.append(_owners.clear)
registry.on_register.append(_names.clear)


def kind_of(value: Any) -> int:
    """`LEAF`, `ARRAY` or `TREE`, remembered for the type."""
    cls = type(value)
    if cls in _PLAIN or isinstance(value, (np.generic, type)):
        kind = LEAF
    elif cls in _CONTAINERS:
        kind = TREE
    else:
        kind = _look(value)
    if len(kinds) >= _MAX_TYPES:
        kinds.clear()
    kinds[cls] = kind
    return kind


def _look(value: Any) -> int:
    if is_array(value):
        return ARRAY
    import optree

    # Named tuples, and dataclasses and other classes that were registered.
    return LEAF if optree.all_leaves([value], none_is_leaf=True, namespace=NAMESPACE) else TREE


def source_of(x: Any) -> tuple[Framework, Any]:
    """The framework of an array, and the array to read, as `decide.find_source` has them; remembers types."""
    owner = _owners.get(type(x))
    if owner is not None:
        return owner, x
    owner, data = find_source(Request(x, "numpy"))
    if data is x and owner.owns(x):
        if len(_owners) >= _MAX_TYPES:
            _owners.clear()
            _names.clear()
        _owners[type(x)] = owner
    return owner, data


def _owner_name(x: Any) -> str:
    """The framework whose own array this is; "" for one of a library that is no framework here."""
    source_of(x)
    owner = _owners.get(type(x))
    return "" if owner is None else owner.name


# A look at the first value of a type may import a framework and take a lock: torch.compile cannot trace that.
# By this mark, which torch.compiler.assume_constant_result leaves, it calls them while it traces; what they
# return is remembered by their callers, which it does trace. (That function itself would import torch here.)
_look._dynamo_marked_constant = True  # type: ignore[attr-defined]
_owner_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def convert(
    x: Any, target: str, grad: Grad = "error", gpu_id: GpuId = None, device: DeviceLike | None = None
) -> Any:
    """`convert_memory`, into which torch.compile does not look where it leaves a framework.

    torch.compile traces the rest of a decorated function, and it, too, traces NumPy; but not what happens to
    the memory behind the arrays.
    """
    name = _names.get(type(x))
    if name is None:
        if len(_names) >= _MAX_TYPES:
            _names.clear()
        name = _names[type(x)] = _owner_name(x)
    if name == target:
        if gpu_id is None and device is None and not trace.open_logs:
            return x  # as convert_memory does
    elif "torch._dynamo" in sys.modules:  # somebody may be compiling
        if not _untraced:
            _untraced.append(registry.framework("torch").untraced(convert_memory))
        return _untraced[0](x, target, grad=grad, gpu_id=gpu_id, device=device)
    return convert_memory(x, target, grad=grad, gpu_id=gpu_id, device=device)


#: `convert_memory` as torch.compile leaves it alone, once that was needed.
_untraced: list[Callable[..., Any]] = []


def map_arrays(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree with its arrays converted; the very object where no array changed.

    Containers keep their types, and dictionaries their order.

    Raises:
        MemoryConversionError: from ``change``, with the path of the array in its message.
    """
    import optree

    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)
    changed = False
    for i, leaf in enumerate(leaves):
        if (kinds.get(type(leaf)) or kind_of(leaf)) == ARRAY:
            try:
                new = change(leaf)
            except MemoryConversionError as error:
                prefix(error, f"at {spec.accessors()[i].codify('')}")
                raise
            if new is not leaf:
                changed = True
                leaves[i] = new
    return optree.tree_unflatten(spec, leaves) if changed else tree


def map_together(trees: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """One tree of what ``join`` makes of the leaves that stand at the same place in all the trees.

    Raises:
        ValueError: the trees differ in structure.
    """
    import optree

    return optree.tree_map(
        lambda *leaves: join(leaves), trees[0], *trees[1:], none_is_leaf=True, namespace=NAMESPACE
    )


def prefix(error: MemoryConversionError, where: str) -> None:
    """Say in the error's message what it is about; its class and its attributes stay."""
    error.args = (f"{where}: {error}",)

"""Whether a package is there: imported, to be found, or hidden; asking imports nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

__all__ = ["can_find", "is_being_imported", "is_hidden", "is_imported"]


def is_imported(package: str) -> bool:
    """Whether this process has imported a package. None in ``sys.modules`` says that it is not to be had.

    What is no module there stands in for one in somebody's test, and answers anything with anything.
    """
    return isinstance(sys.modules.get(package), ModuleType)


def is_being_imported(package: str) -> bool:
    """Whether a package is still at its own import, so that not all that it defines is there."""
    return bool(getattr(getattr(sys.modules.get(package), "__spec__", None), "_initializing", False))


def can_find(package: str) -> bool:
    """Whether a top-level package is imported, or would be found; a folder of its name alone is none."""
    if package in sys.modules:
        return is_imported(package) and not _is_mere_folder(
            package, getattr(sys.modules[package], "__spec__", None)
        )
    from importlib.util import find_spec  # 1 ms

    try:
        spec = find_spec(package)
    except ImportError:  # an import hook refuses it
        return False
    return spec is not None and not _is_mere_folder(package, spec)


# Packages without a file of their own (namespaces), which any folder is → the module that tells them apart.
_CORES = {"mlx": "mlx.core"}


def _is_mere_folder(package: str, spec: ModuleSpec | None) -> bool:
    """Whether Python would make a namespace of some folder that merely has the name of the package."""
    if spec is None or spec.origin is not None or spec.submodule_search_locations is None:
        return False
    from importlib.machinery import NamespaceLoader, PathFinder

    if spec.loader is not None and not isinstance(spec.loader, NamespaceLoader):
        return False
    core = _CORES.get(package)
    return core is None or PathFinder.find_spec(core, spec.submodule_search_locations) is None


def is_hidden(packages: Sequence[str], error: BaseException) -> bool:
    """Whether ``error``, of an import of one of these packages, means that none of them is there.

    One can be hidden although its files are found, by an ``__import__`` of somebody's own. Then none of its
    code has run. Where it is broken, some of it has.
    """
    if not any(can_find(package) for package in packages):
        return True
    if not isinstance(error, ImportError) or any(is_imported(package) for package in packages):
        return False
    ran, entry = set(), error.__traceback__
    while entry is not None:
        ran.add(_root(entry.tb_frame.f_globals.get("__name__")))
        entry = entry.tb_next
    return ran.isdisjoint(packages) and (error.name is None or _root(error.name) in packages)


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]

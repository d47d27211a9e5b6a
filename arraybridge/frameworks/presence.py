"""Whether a package is there: imported, to be found, or hidden; asking imports nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["can_find", "is_being_imported", "is_hidden", "is_imported"]


def is_imported(package: str) -> bool:
    """Whether this process has imported a package. None in ``sys.modules`` says that it is not to be had."""
    return sys.modules.get(package) is not None


def is_being_imported(package: str) -> bool:
    """Whether a package is still at its own import, so that not all that it defines is there."""
    return bool(getattr(getattr(sys.modules.get(package), "__spec__", None), "_initializing", False))


def can_find(package: str) -> bool:
    """Whether a top-level package is imported, or would be found."""
    if package in sys.modules:
        return is_imported(package)
    from importlib.util import find_spec  # 1 ms

    try:
        return find_spec(package) is not None
    except ImportError:  # an import hook refuses it
        return False


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

"""Whether a package is imported, or could be; asking imports nothing."""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["can_find", "is_imported"]


def is_imported(*packages: str) -> bool:
    """Whether this process has imported one of them; what stands in for one in a test is no module."""
    if sys.modules.keys().isdisjoint(packages):
        return False
    return any(isinstance(sys.modules.get(package), ModuleType) for package in packages)


def can_find(package: str) -> bool:
    """Whether a top-level package is imported, or would be found."""
    if package in sys.modules:
        return is_imported(package)
    from importlib.util import find_spec  # 1 ms

    try:
        return find_spec(package) is not None
    except ImportError:  # an import hook refuses it
        return False

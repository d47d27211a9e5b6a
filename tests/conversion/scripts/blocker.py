"""Hide installed packages from a process, as if they had never been installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

FRAMEWORKS = frozenset(
    {
        *("cupy", "torch", "jax", "jaxlib", "tensorflow"),
        *("pyclesperanto", "pyclesperanto_prototype", "pyopencl"),
    }
)


class Blocker(MetaPathFinder):
    """A finder in front of another one that does not find the packages."""

    def __init__(self, finder: Any, hidden: frozenset[str]) -> None:
        self.finder = finder
        self.hidden = hidden

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in self.hidden:
            return None
        return self.finder.find_spec(fullname, path, target)

    def find_distributions(self, *context: Any) -> Any:
        """Keep the metadata, because `dask.array` reads NumPy's."""
        find = getattr(self.finder, "find_distributions", None)
        return () if find is None else find(*context)


def hide(*names: str) -> None:
    """Hide these packages, or every framework but NumPy."""
    hidden = frozenset(names) or FRAMEWORKS
    sys.meta_path[:] = [Blocker(finder, hidden) for finder in sys.meta_path]

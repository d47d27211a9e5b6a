"""The table of pairwise converters, and the few ways in which an array travels.

Each cell names the way in which a pair shares memory, or else the one in which it copies. A cell states the
intent; `decide` has the last word, which knows the particular array: its device, strides, dtype and flags.
A framework outside the grid travels by `view`, through the host.

``same``    the very object comes back
``view``    the target looks at the source's host memory, through NumPy
``dlpack``  the target shares the source's memory, on the host or on a card, through DLPack
``device``  the bytes are copied straight into the memory of a device
``host``    the bytes are copied into host memory, or by way of it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from arraybridge.frameworks.accelerators import identity
from arraybridge.frameworks.base import Framework

FastFunction = Callable[[Any], Any]
#: Builds the fast converter of a pair for arrays that need no care, or None where each needs it.
RouteFunction = Callable[[Framework, Framework], "FastFunction | None"]


def same(source: Framework, target: Framework) -> FastFunction | None:
    """The very object comes back."""
    return identity


def view(source: Framework, target: Framework) -> FastFunction | None:
    """The target looks at the source's host memory through NumPy."""
    export_view: FastFunction | None = source.fast_path.fast_view
    take: FastFunction | None = target.fast_path.fast_from_view
    if export_view is None or take is None:
        return None
    if take is identity:
        return export_view
    return take if export_view is identity else (lambda x: take(export_view(x)))


def dlpack(source: Framework, target: Framework) -> FastFunction | None:
    """The target shares the source's memory through a DLPack capsule."""
    export = source.fast_path.fast_export
    import_from = target.fast_path.fast_import
    if export is None or import_from is None:
        return None
    return lambda x: import_from(export(x))


def device(source: Framework, target: Framework) -> FastFunction | None:
    """The bytes are copied straight into the memory of a device; every array is looked at."""
    return None


def host(source: Framework, target: Framework) -> FastFunction | None:
    """The bytes are copied into host memory, or by way of it; every array is looked at."""
    return None


FRAMEWORKS = ("numpy", "cupy", "torch", "jax", "tensorflow", "pyclesperanto")

# fmt: off
_GRID: dict[str, tuple[RouteFunction, ...]] = {
    # from \ to       numpy   cupy    torch   jax     tensorflow  pyclesperanto
    "numpy":         (same,   device, view,   dlpack, dlpack,     device),
    "cupy":          (host,   same,   dlpack, dlpack, dlpack,     host),
    "torch":         (view,   dlpack, same,   dlpack, dlpack,     device),
    "jax":           (view,   dlpack, dlpack, same,   dlpack,     device),
    "tensorflow":    (view,   dlpack, dlpack, dlpack, same,       device),
    "pyclesperanto": (host,   host,   host,   host,   host,       same),
}
# fmt: on

#: ``TABLE[source][target]`` is the route function of the pair.
TABLE: dict[str, dict[str, RouteFunction]] = {
    source: dict(zip(FRAMEWORKS, row, strict=True)) for source, row in _GRID.items()
}


def cell(source: str, target: str) -> RouteFunction:
    """The route function of a pair, frameworks outside the grid included.

    >>> cell("numpy", "jax").__name__
    'dlpack'
    """
    if source == target:
        return same
    return TABLE.get(source, {}).get(target, view)

"""The table of pairwise converters.

Each cell names the route by which a pair shares memory, or else the way in which it copies. A cell states
the intent; `decide` has the last word, which knows the particular array: its device, strides, dtype
and flags. A framework outside the grid travels by `routes.view`, through the host.
"""

from __future__ import annotations

from arraybridge.conversion.routes import FastFunction, RouteFunction, device, dlpack, host, same, view
from arraybridge.frameworks.base import Framework
from arraybridge.types import Cache

__all__ = ["FRAMEWORKS", "TABLE", "cell", "fast_converter"]

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


# By the source itself: what stands for arrays of other libraries has NumPy's name, and no fast part.
_fast: Cache[tuple[type, Framework, str], FastFunction | None] = Cache()


def fast_converter(source: Framework, target: Framework, cls: type) -> FastFunction | None:
    """What the cell of a pair makes for arrays of this class that need no care; None where each needs it."""
    known = (cls, source, target.name)
    try:
        return _fast[known]
    except KeyError:
        exact = source is target or cls in source.fast.types()
    made = cell(source.name, target.name)(source, target) if exact else None
    return _fast.keep(known, made)

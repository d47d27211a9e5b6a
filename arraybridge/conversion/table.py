"""Table of the methods by which each pair of frameworks shares or copies memory.

Each cell contains the method that shares memory, if there is one, and otherwise the method that copies.
These are the methods for ordinary arrays. `decide` may choose another method, depending on the device,
strides, dtype and flags of an array. Pairs outside the table use `view`, through host memory.

``same``    the result is the same object
``view``    the target views the source's host memory, through NumPy
``dlpack``  the target shares the source's memory on the host or on a GPU, through DLPack
``device``  the bytes are copied to the memory of a device
``host``    the bytes are copied to host memory, or through it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from arraybridge.interface.framework import Framework, NoPlanError, native_errors
from arraybridge.interface.streams import identity

FastFunction = Callable[[Any], Any]
#: A function that returns the fast converter from a source framework to a target framework, or None if there
#: is none. Fast converters convert only arrays that need no special handling.
RouteFunction = Callable[[Framework, Framework], "FastFunction | None"]


def same(source: Framework, target: Framework) -> FastFunction | None:
    """Return the fast converter of a framework to itself, which returns the same object."""
    return identity


def view(source: Framework, target: Framework) -> FastFunction | None:
    """Return the fast converter that views host memory through NumPy, or None if there is none."""
    export_view: FastFunction | None = source.fast_path.fast_view
    import_view: FastFunction | None = target.fast_path.fast_from_view
    if export_view is None or import_view is None:
        return None
    if import_view is identity:
        return export_view
    return import_view if export_view is identity else (lambda x: import_view(export_view(x)))


def dlpack(source: Framework, target: Framework) -> FastFunction | None:
    """Return the fast converter that shares memory through a DLPack capsule, or None if there is none."""
    export = source.fast_path.fast_export
    import_from = target.fast_path.fast_import
    if export is None or import_from is None:
        return None
    errors = native_errors(target)

    def convert(x: Any) -> Any:
        capsule = export(x)
        try:
            return import_from(capsule)
        except errors as error:
            raise NoPlanError from error

    return convert


def device(source: Framework, target: Framework) -> FastFunction | None:
    """Return None: copies to a device have no fast converter."""
    return None


def host(source: Framework, target: Framework) -> FastFunction | None:
    """Return None: copies through host memory have no fast converter."""
    return None


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

FRAMEWORKS = tuple(_GRID)
#: The route function of each pair of frameworks, as ``TABLE[source][target]``.
TABLE: dict[str, dict[str, RouteFunction]] = {
    source: dict(zip(FRAMEWORKS, row, strict=True)) for source, row in _GRID.items()
}


def cell(source: str, target: str) -> RouteFunction:
    """Return the route function for a pair of frameworks, including pairs outside the table.

    >>> cell("numpy", "jax").__name__
    'dlpack'
    """
    if source == target:
        return same
    return TABLE.get(source, {}).get(target, view)

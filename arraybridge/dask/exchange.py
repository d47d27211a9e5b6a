"""In and out: an array of any framework as a Dask array, and a Dask array computed into any framework."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np

from arraybridge.conversion.convert import convert_memory, device_of
from arraybridge.errors import DtypeNotSupportedError
from arraybridge.frameworks import registry
from arraybridge.types import FrameworkLike, GpuId

__all__ = ["from_dask", "to_dask"]


def to_dask(x: Any, chunks: Any = "auto", *, name: str | None = None, grad: Any = "error") -> Any:
    """An array of any framework as a Dask array.

    Its chunks are NumPy arrays of what lives on the host, and CuPy arrays of what lives on an NVIDIA card, if
    CuPy is installed. Dask takes a copy, so that later writes to the array change nothing.

    Args:
        x: an array.
        chunks: as for ``dask.array.from_array``: an int, a tuple for each axis, or ``"auto"``.
        name: the name in the graph. Left out, it is made from the values and the chunks.
        grad: as for `convert_memory`.

    Raises:
        UnknownArrayError: ``x`` is no array.
        DtypeNotSupportedError: its elements are Python objects or the like.
        ValueError: ``chunks`` does not fit the shape.

    >>> import numpy as np
    >>> to_dask(np.zeros((4, 6)), chunks=(2, 3)).numblocks
    (2, 2)
    """
    on_card = device_of(x).kind == "gpu" and registry.usable("cupy") is not None
    array = convert_memory(x, "cupy" if on_card else "numpy", grad=grad)
    if array.dtype.hasobject:
        raise DtypeNotSupportedError(
            f"an array of dtype {array.dtype} holds Python objects, which no framework but NumPy has; make it"
            " a Dask array with dask.array.from_array(x, chunks)",
            source_type="numpy",
            reason=f"dtype {array.dtype}",
        )
    # Without asarray=False Dask would bring CuPy's arrays to the host.
    return da.from_array(array, chunks=chunks, name=name, asarray=False)


def from_dask(
    array: Any, framework: FrameworkLike, gpu_id: GpuId = None, *, copy: bool | None = None, **options: Any
) -> Any:
    """Compute a Dask array, and return it as an array of a framework.

    Args:
        array: a Dask array. All of it has to fit into memory, and for a moment twice.
        framework: as for `convert_memory`.
        gpu_id: as for `convert_memory`.
        copy: as for `convert_memory`.
        **options: ``dtype`` and ``device``, as for `convert_memory`.

    Raises:
        TypeError: ``array`` is no Dask array.
        and what `convert_memory` raises.

    >>> import numpy as np
    >>> from_dask(to_dask(np.arange(4), chunks=2) + 1, "torch")
    tensor([1, 2, 3, 4])
    """
    name = registry.framework_name(framework)
    if not isinstance(array, da.Array):
        raise TypeError(
            f"from_dask() takes a Dask array, and this is a {type(array).__name__}; convert_memory() takes"
            " others"
        )
    computed = array.compute()
    if isinstance(computed, np.generic):  # what NumPy makes of an array without axes
        computed = np.asarray(computed)
    return convert_memory(computed, name, gpu_id=gpu_id, copy=copy, **options)

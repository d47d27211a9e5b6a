"""What to write instead of handing over an object that is no array."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["hint_for"]

# Root module and name of a class, or of the first of its bases that is found here → the expression.
_EXPRESSIONS = {
    (
        "pandas",
        "",
    ): "x.to_numpy(dtype), with a dtype of numbers for all of it (of categories, x.cat.codes)",
    ("polars", ""): "x.to_numpy(), or x.to_physical().to_numpy() of categories",
    ("xarray", "Dataset"): 'x["name"], one of its variables, or x.to_dataarray()',
    ("xarray", ""): "x.data",
    ("h5py", ""): "x[...]",
    ("zarr", "Group"): 'x["name"][...]',
    ("h5py", "Group"): 'x["name"][...]',
    ("h5py", "File"): 'x["name"][...]',
    ("zarr", ""): "x[...]",
    ("scipy", ""): "x.toarray()",
    ("sparse", ""): "x.todense()",
    ("dask", ""): "x.compute(), or work on its blocks with arraybridge.dask.map_blocks(fn, x)",
}


def hint_for(x: Any) -> str:
    """The advice for an object that is no array, as the end of a sentence."""
    for cls in type(x).__mro__:
        root = cls.__module__.partition(".")[0]
        expression = _EXPRESSIONS.get((root, cls.__name__)) or _EXPRESSIONS.get((root, ""))
        if expression is not None:
            return f"pass {expression}"
    if isinstance(x, (list, tuple, dict)):
        return "convert the arrays inside it with convert_tree(), or make one array of it with np.asarray()"
    if isinstance(x, (int, float, complex, np.generic)):
        return "make an array of it with np.asarray(x)"
    if isinstance(x, (bytes, bytearray)):
        return "say what its bytes are, as in np.frombuffer(x, np.uint8)"
    if isinstance(x, (memoryview, range)) or type(x).__module__ == "array" or _is_buffer(x):
        return "make an array of it with np.asarray(x)"
    if hasattr(type(x), "__array__"):
        return "it offers __array__(): pass np.asarray(x)"
    return (
        "pass an array of numpy, cupy, torch, jax, tensorflow or pyclesperanto, or any object with"
        " __dlpack__, __array_interface__ or __cuda_array_interface__"
    )


def _is_buffer(x: Any) -> bool:
    """Whether it offers the buffer protocol (ctypes arrays, maps of files)."""
    try:
        memoryview(x).release()
    except (TypeError, BufferError, ValueError):
        return False
    return True

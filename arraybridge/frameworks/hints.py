"""What to write instead of handing over an object that is no array."""

from __future__ import annotations

from typing import Any

import numpy as np

# Root module of a class, or of the first of its bases that is found here → the expression.
_EXPRESSIONS = {
    "pandas": "x.to_numpy(dtype), with a dtype of numbers for all of it (of categories, x.cat.codes)",
    "polars": "x.to_numpy(), or x.to_physical().to_numpy() of categories",
    "xarray": 'x["name"], one of its variables, or x.to_dataarray()',
    "h5py": 'x["name"][...]',
    "zarr": 'x["name"][...]',
    "scipy": "x.toarray()",
    "sparse": "x.todense()",
    "pyopencl": "x.get()",
    "numba": "x.copy_to_host()",
    "dask": "x.compute(), or work on its blocks with arraybridge.dask.map_blocks(fn, x)",
}


def hint_for(x: Any) -> str:
    """The advice for an object that is no array, as the end of a sentence."""
    for cls in type(x).__mro__:
        expression = _EXPRESSIONS.get(cls.__module__.partition(".")[0])
        if expression is not None:
            return f"pass {expression}"
    if isinstance(x, (list, tuple, dict)):
        return "convert the arrays inside it with convert_tree(), or make one array of it with np.asarray()"
    if isinstance(x, (int, float, complex, range, memoryview, np.generic)):
        return "make an array of it with np.asarray(x)"
    if hasattr(type(x), "__array__"):
        return "it offers __array__(): pass np.asarray(x)"
    return (
        "pass an array of numpy, cupy, torch, jax, tensorflow or pyclesperanto, or any object with"
        " __dlpack__, __array_interface__ or __cuda_array_interface__"
    )

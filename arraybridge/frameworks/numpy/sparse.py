"""SciPy's sparse arrays, which belong to the framework ``numpy``."""

from __future__ import annotations

import copy
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from arraybridge.advice import Advice
from arraybridge.errors import (
    ArrayNotSupportedError,
    DtypeNotSupportedError,
    FrameworkNotInstalledError,
    error_text,
)
from arraybridge.host.dtype_names import np_dtype
from arraybridge.interface.sparse import INT32_OR_INT64, Expressions, Layout, SparseArrays, SparseParts

__all__ = ["ScipySparse"]

_LAYOUTS = (Layout.CSR, Layout.CSC, Layout.COO, Layout.BSR)
_BY_FORMAT = {layout.value: layout for layout in _LAYOUTS}


class ScipySparse(SparseArrays):
    """SciPy's CSR, CSC, COO and BSR arrays (such as ``csr_array``) and matrices (such as ``csr_matrix``)."""

    layouts: ClassVar = dict.fromkeys(_LAYOUTS, INT32_OR_INT64)
    title: ClassVar[str] = "scipy.sparse"
    has_matrices: ClassVar[bool] = True
    separates_axes: ClassVar[bool] = True

    @property
    def most_axes(self) -> int | None:
        _scipy()
        version = sys.modules["scipy"].__version__
        # SciPy < 1.15 supports at most two axes (scipy/scipy#21197).
        return None if tuple(map(int, version.split(".")[:2])) >= (1, 15) else 2

    def layout(self, x: Any) -> str:
        # `issparse` caches every class that it is passed (python/cpython#94284).
        if issubclass(type(x), np.ndarray):
            return ""
        # `issparse` is missing while another thread is importing the module.
        is_sparse = getattr(sys.modules.get("scipy.sparse"), "issparse", None)
        return str(x.format) if is_sparse is not None and is_sparse(x) else ""

    def take_apart(self, x: Any) -> SparseParts | None:
        layout = _BY_FORMAT.get(x.format)
        if layout is None:
            return None
        try:
            return _coordinates(layout, x) if layout == "coo" else _parts_of_compressed(layout, x)
        except (AttributeError, IndexError, TypeError) as error:  # a part is invalid or was deleted
            raise _inconsistent_error(x) from error

    def put_together(self, parts: SparseParts, like: Any = None) -> Any:
        scipy = _scipy()
        kind = "array"
        if like is not None and not isinstance(like, scipy.sparray) and len(parts.shape) == 2:
            kind = "matrix"
        blocks = parts.values.shape[1:] if parts.layout is Layout.BSR else ()
        # The attributes are set directly, because the constructors copy views, and those of matrices also
        # read the indices and narrow int64 to int32 (scipy/scipy#16774). Some constructors also reject dtypes
        # that SciPy stores but does not compute with, such as float16 (scipy/scipy#20207).
        made = copy.copy(_empty(f"{parts.layout}_{kind}", parts.shape, blocks))
        made.data = parts.values
        if parts.layout is Layout.COO:
            made.coords = parts.indices
            made.has_canonical_format = parts.is_sorted and parts.is_unique
            return made
        made.indices, made.indptr = parts.indices
        if parts.is_sorted and parts.is_unique:
            made.has_canonical_format = True
        elif parts.is_sorted:
            made.has_sorted_indices = True
        return made

    def copy(self, x: Any) -> Any:
        """Return a copy with the same dtypes.

        The method ``copy`` of a matrix narrows int64 indices to int32 (scipy/scipy#11522), and it raises for
        values that SciPy stores but does not compute with, such as float16 (SciPy 1.13 to 1.17,
        scipy/scipy#20207).
        """
        if x.format not in self.layouts:
            return x.copy()
        made = copy.copy(x)
        made.data = x.data.copy()
        if x.format == "coo":
            made.coords = tuple(axis.copy() for axis in x.coords)
        else:
            made.indices = x.indices.copy()
            made.indptr = x.indptr.copy()
        return made

    def check_cast(self, x: Any, dtype: str) -> None:
        try:
            getattr(_scipy(), f"{x.format}_array")((1, 1)).astype(np_dtype(dtype))
        except ValueError as error:
            name = type(x).__name__
            raise DtypeNotSupportedError(
                f"A scipy.sparse {name} does not support dtype {dtype}.",
                source_type="numpy",
                reason=error_text(error),
                advice=Advice("Pass {}, whose values can be cast.", ("{x}.tocsr()",)),
            ) from error

    def expressions(self, x: Any) -> Expressions:
        # SciPy 1.17 stores dtypes such as float16 and bfloat16, but cannot convert them to another layout
        # (scipy/scipy#7408, closed as not planned).
        has_kernels = x.dtype.isbuiltin != 2 and x.dtype != np.float16
        code = "{x}" if has_kernels else '{x}.astype("float32")'
        layouts = {layout: f"{code}.to{layout}()" for layout in self.layouts}
        if len(x.shape) != 2:  # csr_array may have one axis, coo_array any number
            layouts = {Layout.COO: f"{code}.tocoo()"}
        elements = "{x}.data" if x.format in self.layouts else "{x}.tocoo().data"
        values = elements.replace("{x}", code)
        dtype = "" if has_kernels else "float32"
        return Expressions(values, layouts, f"{code}.toarray()", elements=elements, dtype=dtype)


@lru_cache(maxsize=64)
def _empty(name: str, shape: tuple[int, ...], blocks: tuple[int, ...]) -> Any:
    """Return an array without entries, whose data and indices have to be set. The constructors are slow."""
    options = {"blocksize": blocks} if blocks else {}
    made = getattr(_scipy(), name)(shape, **options)
    if hasattr(made, "indptr"):
        made.indptr = np.empty(0, np.int32)  # the cache keeps no memory for rows
    return made


def _coordinates(layout: Layout, x: Any) -> SparseParts:
    """Return the parts of a COO array."""
    values = x.data
    axes = tuple(x.coords)
    shape = (len(values),)
    for one in (values, *axes):  # `any` with a generator takes 0.3 µs longer
        if one.shape != shape:
            raise _inconsistent_error(x)
    # Canonical means sorted by row, then column, and without duplicates.
    canonical = bool(x.has_canonical_format)
    return SparseParts(layout, x.shape, values, axes, canonical, canonical)


def _parts_of_compressed(layout: Layout, x: Any) -> SparseParts:
    """Return the parts of a CSR, CSC or BSR array."""
    values = x.data
    indices = x.indices
    pointers = x.indptr
    shape = x.shape
    count = int(pointers.item(-1))  # faster than a NumPy scalar
    if len(values) != count or indices.shape != (count,):
        # The arrays have space for more entries, which SciPy ignores and other frameworks would read.
        values = values[:count]
        indices = indices[:count]
        if len(values) != count or indices.shape != (count,):
            raise _inconsistent_error(x)
    rows = shape[-1] if layout == "csc" else shape[0]
    axes = 1
    if len(shape) == 1:
        rows = 1
    elif layout == "bsr":
        rows //= values.shape[1]
        axes = 3
    # An array with parts that do not fit together would crash the process in another framework.
    if pointers.shape != (rows + 1,) or values.ndim != axes:
        raise _inconsistent_error(x)
    # is_sorted and is_unique remain False, because has_sorted_indices and has_canonical_format read every
    # index on first access (scipy/scipy#18546).
    return SparseParts(layout, shape, values, (indices, pointers))


def _inconsistent_error(x: Any) -> ArrayNotSupportedError:
    advice = "Find the cause with x.check_format()."
    if x.format == "coo":  # COO arrays do not have check_format()
        advice = "Its data and each of its coords must be 1-D arrays of the same length."
    return ArrayNotSupportedError(
        f"Cannot convert a sparse {x.format.upper()} array of scipy.sparse: its values, indices and shape do"
        " not fit together.",
        source_type="numpy",
        reason="its values, indices and shape do not fit together",
        advice=advice,
    )


def _scipy() -> ModuleType:
    try:
        import scipy.sparse
    except ImportError as error:
        raise FrameworkNotInstalledError(
            "Sparse NumPy arrays require SciPy, which is not installed.",
            target_type="numpy",
            reason=error_text(error),
            advice='Run pip install "scipy>=1.13".',
        ) from error
    return scipy.sparse

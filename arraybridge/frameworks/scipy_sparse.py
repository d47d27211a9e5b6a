"""SciPy's sparse arrays, which belong to the framework ``numpy``."""

from __future__ import annotations

import sys
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
from arraybridge.frameworks.dtype_names import np_dtype
from arraybridge.frameworks.sparse import INT32_OR_INT64, Expressions, Layout, SparseArrays, SparseParts

__all__ = ["ScipySparse"]

_LAYOUTS = (Layout.CSR, Layout.CSC, Layout.COO, Layout.BSR)


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
        # SciPy < 1.15 supports at most two axes.
        return None if tuple(map(int, version.split(".")[:2])) >= (1, 15) else 2

    def layout(self, x: Any) -> str:
        if issubclass(type(x), np.ndarray):  # `issparse` caches every class that it is passed
            return ""
        # `issparse` is missing while another thread is importing the module.
        is_sparse = getattr(sys.modules.get("scipy.sparse"), "issparse", None)
        return str(x.format) if is_sparse is not None and is_sparse(x) else ""

    def take_apart(self, x: Any) -> SparseParts | None:
        layout = x.format
        try:
            if layout == "coo":
                return _coordinates(x)
            return _compressed(Layout(layout), x) if layout in self.layouts else None
        except (AttributeError, IndexError, TypeError) as error:  # a part is invalid or was deleted
            raise _inconsistent(x) from error

    def put_together(self, parts: SparseParts, like: Any = None) -> Any:
        scipy = _scipy()
        kind = "array"
        if like is not None and not isinstance(like, scipy.sparray) and len(parts.shape) == 2:
            kind = "matrix"
        make = getattr(scipy, f"{parts.layout}_{kind}")
        options = {"blocksize": parts.values.shape[1:]} if parts.layout is Layout.BSR else {}
        # The attributes are set directly, because the constructors copy views, and those of matrices also
        # read the indices and narrow int64 to int32. Some constructors also reject dtypes that SciPy stores
        # but does not compute with, such as float16.
        made = make(parts.shape, **options)
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
        layouts = {layout: f"{{x}}.to{layout}()" for layout in self.layouts}
        if len(x.shape) != 2:  # csr_array may have one axis, coo_array any number
            layouts = {Layout.COO: "{x}.tocoo()"}
        values = "{x}.data" if x.format in self.layouts else "{x}.tocoo().data"
        return Expressions(values, layouts, "{x}.toarray()", elements=values)


def _coordinates(x: Any) -> SparseParts:
    """Return the parts of a COO array."""
    values = x.data
    shape = (len(values),)
    if values.shape != shape or any(axis.shape != shape for axis in x.coords):
        raise _inconsistent(x)
    # Canonical means sorted by row, then column, and without duplicates.
    canonical = bool(x.has_canonical_format)
    return SparseParts(Layout.COO, x.shape, values, tuple(x.coords), canonical, canonical)


def _compressed(layout: Layout, x: Any) -> SparseParts:
    """Return the parts of a CSR, CSC or BSR array."""
    values = x.data
    indices = x.indices
    pointers = x.indptr
    shape = x.shape
    count = int(pointers[-1])
    if len(indices) != count or len(values) != count:
        # The arrays have space for more entries, which SciPy ignores and other frameworks would read.
        values = values[:count]
        indices = indices[:count]
    rows = shape[-1] if layout is Layout.CSC else shape[0]
    if len(shape) == 1:
        rows = 1
    elif layout is Layout.BSR:
        rows //= values.shape[1]
    # An array with parts that do not fit together would crash the process in another framework.
    if pointers.shape != (rows + 1,) or indices.shape != (count,) or len(values) != count:
        raise _inconsistent(x)
    if values.ndim != (3 if layout is Layout.BSR else 1):
        raise _inconsistent(x)
    # is_sorted and is_unique remain False, because has_sorted_indices and has_canonical_format read every
    # index on first access.
    return SparseParts(layout, shape, values, (indices, pointers))


def _inconsistent(x: Any) -> ArrayNotSupportedError:
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

"""CuPy sparse matrices: `cupyx.scipy.sparse`."""

from __future__ import annotations

import importlib
import sys
from typing import Any, ClassVar

from arraybridge.frameworks.cupy.current_gpu import on_gpu
from arraybridge.interface.sparse import INT32_OR_INT64, Expressions, Layout, SparseArrays, SparseParts

__all__ = ["CupyxSparse", "is_sparse"]

_MODULE = "cupyx.scipy.sparse"
_LAYOUTS = (Layout.CSR, Layout.CSC, Layout.COO)


def is_sparse(x: Any) -> bool:
    """Return whether ``x`` is a CuPy sparse matrix, without importing anything."""
    # The function is missing while another thread is importing the module.
    issparse = getattr(sys.modules.get(_MODULE), "issparse", None)
    return issparse is not None and bool(issparse(x))


class CupyxSparse(SparseArrays):
    """CuPy's CSR, CSC and COO formats. Results are matrices, because some releases have no sparse arrays."""

    layouts: ClassVar = dict.fromkeys(_LAYOUTS, INT32_OR_INT64)
    dtypes: ClassVar = frozenset(("bool", "float32", "float64", "complex64", "complex128"))
    title: ClassVar[str] = _MODULE
    has_matrices: ClassVar[bool] = True
    separates_axes: ClassVar[bool] = True
    least_axes: ClassVar[int] = 2

    @property
    def most_axes(self) -> int | None:
        return 2

    def layout(self, x: Any) -> str:
        return str(x.format) if is_sparse(x) else ""

    def take_apart(self, x: Any) -> SparseParts | None:
        if x.format == "coo":
            # Canonical means sorted by row, then column, and without duplicates.
            canonical = bool(x.has_canonical_format)
            axes = (x.row, x.col) if len(x.shape) == 2 else (x.col,)
            return SparseParts(Layout.COO, tuple(x.shape), x.data, axes, canonical, canonical)
        if x.format not in self.layouts:
            return None
        return SparseParts(Layout(x.format), tuple(x.shape), x.data, (x.indices, x.indptr))

    def put_together(self, parts: SparseParts, like: Any = None) -> Any:
        sparse = importlib.import_module(_MODULE)
        kind = "matrix"
        if like is not None and hasattr(sparse, "sparray") and isinstance(like, sparse.sparray):
            kind = "array"
        make = getattr(sparse, f"{parts.layout}_{kind}")
        # The attributes are set directly, because the constructors read the indices and may narrow their
        # dtype (as in scipy/scipy#16774).
        with on_gpu(parts.values.device.id):
            made = make(parts.shape, dtype=parts.values.dtype)
        made.data = parts.values
        if parts.layout is Layout.COO:
            made.row, made.col = parts.indices
            made.has_canonical_format = parts.is_sorted and parts.is_unique
        else:
            made.indices, made.indptr = parts.indices
        return made

    def expressions(self, x: Any) -> Expressions:
        layouts = {layout: f"{{x}}.to{layout}()" for layout in self.layouts}
        values = "{x}.data" if x.format in self.layouts else "{x}.tocoo().data"
        return Expressions(values, layouts, "{x}.toarray()")

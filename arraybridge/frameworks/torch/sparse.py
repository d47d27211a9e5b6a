"""Sparse PyTorch tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from arraybridge.frameworks.sparse import (
    INT32_OR_INT64,
    INT64,
    Expressions,
    Layout,
    SparseArrays,
    SparseParts,
)

__all__ = ["TorchSparse"]

_NAMES = {
    torch.sparse_csr: Layout.CSR,
    torch.sparse_csc: Layout.CSC,
    torch.sparse_coo: Layout.COO,
    torch.sparse_bsr: Layout.BSR,
    torch.sparse_bsc: Layout.BSC,
}
_LAYOUTS = {name: layout for layout, name in _NAMES.items()}
_ROWS = (Layout.CSR, Layout.BSR)


class TorchSparse(SparseArrays):
    """PyTorch's CSR, CSC, COO, BSR and BSC tensors.

    All of them may have dense axes, and all except COO may have batch axes.
    """

    layouts: ClassVar = {
        Layout.CSR: INT32_OR_INT64,
        Layout.CSC: INT32_OR_INT64,
        Layout.COO: INT64,
        Layout.BSR: INT32_OR_INT64,
        Layout.BSC: INT32_OR_INT64,
    }
    title: ClassVar[str] = "PyTorch"
    has_own_classes: ClassVar[bool] = False
    has_dense_axes: ClassVar[bool] = True
    columns_first: ClassVar[bool] = True
    least_axes: ClassVar[int] = 0

    def layout(self, x: torch.Tensor) -> str:
        name = _NAMES.get(x.layout)
        return "" if name is None else name.value

    def take_apart(self, x: torch.Tensor) -> SparseParts | None:
        layout = _NAMES.get(x.layout)
        if layout is None:
            return None
        if layout is Layout.COO:
            coalesced = x.is_coalesced()
            # indices() and values() are only defined for coalesced tensors.
            indices = x._indices().t()  # noqa: SLF001
            return SparseParts(
                layout,
                tuple(x.shape),
                x._values(),  # noqa: SLF001
                (indices,),
                coalesced,
                coalesced,
                dense_axes=x.dense_dim(),
            )
        if layout in _ROWS:
            compressed = x.col_indices(), x.crow_indices()
        else:
            compressed = x.row_indices(), x.ccol_indices()
        values = x.values()
        batch_axes = compressed[0].ndim - 1
        entry_axes = values.ndim - batch_axes - 1
        dense_axes = entry_axes - 2 if layout.has_blocks else entry_axes
        return SparseParts(
            layout, tuple(x.shape), values, compressed, batch_axes=batch_axes, dense_axes=dense_axes
        )

    def put_together(self, parts: SparseParts, like: Any = None) -> torch.Tensor:
        # Pass the current setting explicitly, because PyTorch warns if the argument is missing.
        check = torch.sparse.check_sparse_tensor_invariants.is_enabled()
        if parts.layout is Layout.COO:
            coalesced = True if parts.is_sorted and parts.is_unique else None
            return torch.sparse_coo_tensor(
                parts.indices[0].t(),
                parts.values,
                parts.shape,
                is_coalesced=coalesced,
                check_invariants=check,
            )
        indices, pointers = parts.indices
        return torch.sparse_compressed_tensor(
            pointers,
            indices,
            parts.values,
            parts.shape,
            layout=_LAYOUTS[parts.layout],
            check_invariants=check,
        )

    def expressions(self, x: torch.Tensor) -> Expressions:
        layout = _NAMES.get(x.layout)
        layouts = {Layout.COO: "{x}.to_sparse_coo()"}
        if x.ndim == 2:
            # PyTorch converts block layouts to other compressed layouts only through COO.
            through = "" if layout is None or not layout.has_blocks else ".to_sparse_coo()"
            layouts[Layout.CSR] = f"{{x}}{through}.to_sparse_csr()"
            layouts[Layout.CSC] = f"{{x}}{through}.to_sparse_csc()"
        values = "{x}.coalesce().values()" if layout is Layout.COO else "{x}.values()"
        # PyTorch has no function that makes dense axes sparse.
        has_dense_axes = layout is not None and x.dense_dim() > 0
        return Expressions(values, layouts, "{x}.to_dense()", "" if has_dense_axes else "{x}.to_sparse_coo()")

"""Sparse PyTorch tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from arraybridge.frameworks.torch.surroundings import retry_in_isolation
from arraybridge.host.dtype_names import DLPACK
from arraybridge.interface.sparse import (
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
# Dtypes that PyTorch 2.13 stores in sparse tensors, but neither coalesces nor converts to another layout
# (pytorch/pytorch#58734) → a dtype that it converts.
_WITHOUT_KERNELS = {
    torch.uint16: "int32",
    torch.uint32: "int64",
    torch.uint64: "float64",
    **{dtype: "float32" for name in DLPACK if (dtype := getattr(torch, name, None)) and "float8" in name},
}
_are_invariants_checked = torch.sparse.check_sparse_tensor_invariants.is_enabled
_COO = Layout.COO  # in Python 3.11, an attribute of an enum takes 0.1 µs
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
        return retry_in_isolation(_parts, x, layout)

    def put_together(self, parts: SparseParts, like: Any = None) -> torch.Tensor:
        try:
            return _tensor(parts)
        except (AssertionError, RuntimeError, UserWarning):
            pass
        try:
            return retry_in_isolation(_tensor, parts)
        except UserWarning:
            # Where warnings are errors: that compressed layouts are in beta, once per process
            # (aten/src/ATen/SparseCsrTensorImpl.cpp, torch 2.13).
            return retry_in_isolation(_tensor, parts)

    def expressions(self, x: torch.Tensor) -> Expressions:
        layout = _NAMES.get(x.layout)
        dtype = _WITHOUT_KERNELS.get(x.dtype, "")
        code = f"{{x}}.to(torch.{dtype})" if dtype else "{x}"
        layouts = {Layout.COO: f"{code}.to_sparse_coo()"}
        if x.ndim == 2:
            # PyTorch converts block layouts to other compressed layouts only through COO (torch 2.13,
            # pytorch/pytorch#128296).
            through = "" if layout is None or not layout.has_blocks else ".to_sparse_coo()"
            layouts[Layout.CSR] = f"{code}{through}.to_sparse_csr()"
            layouts[Layout.CSC] = f"{code}{through}.to_sparse_csc()"
        values = f"{code}.coalesce().values()" if layout is Layout.COO else f"{code}.values()"
        plain = layouts[Layout.COO]
        # PyTorch has no function that makes dense axes sparse (torch 2.13).
        if layout is not None and x.dense_dim() > 0:
            layouts, plain = {}, ""
        return Expressions(values, layouts, f"{code}.to_dense()", plain, values, dtype)


def _parts(x: torch.Tensor, layout: Layout) -> SparseParts:
    """Return the parts of a sparse tensor, which share its memory."""
    if layout is _COO:
        coalesced = x.is_coalesced()
        # indices() and values() are only defined for coalesced tensors (pytorch/pytorch#109017).
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


def _tensor(parts: SparseParts) -> torch.Tensor:
    """Return a sparse tensor that consists of ``parts``."""
    values = parts.values
    # Pass the current setting explicitly, because PyTorch warns if the argument is missing
    # (pytorch/pytorch#171695).
    check = _are_invariants_checked()
    if parts.layout is _COO:
        coalesced = True if parts.is_sorted and parts.is_unique else None
        return torch.sparse_coo_tensor(
            parts.indices[0].t(),
            values,
            parts.shape,
            device=values.device,
            is_coalesced=coalesced,
            check_invariants=check,
        )
    indices, pointers = parts.indices
    return torch.sparse_compressed_tensor(
        pointers,
        indices,
        values,
        parts.shape,
        device=values.device,
        layout=_LAYOUTS[parts.layout],
        check_invariants=check,
    )

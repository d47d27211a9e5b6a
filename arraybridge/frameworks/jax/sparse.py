"""JAX sparse arrays: `jax.experimental.sparse`."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import jax
import numpy as np

from arraybridge.errors import ArrayNotSupportedError
from arraybridge.frameworks import registry
from arraybridge.frameworks.sparse import ANY_DTYPE, Expressions, Layout, SparseArrays, SparseParts

__all__ = ["JaxSparse", "is_sparse"]

_MODULE = "jax.experimental.sparse"


def is_sparse(x: Any) -> bool:
    """Return whether ``x`` is a JAX sparse array, without importing anything."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(x, module.JAXSparse)


class JaxSparse(SparseArrays):
    """JAX's BCSR and BCOO arrays. The older classes CSR, CSC and COO are not supported."""

    layouts: ClassVar = {Layout.CSR: ANY_DTYPE, Layout.COO: ANY_DTYPE}
    title: ClassVar[str] = _MODULE
    has_dense_axes: ClassVar[bool] = True
    least_axes: ClassVar[int] = 0

    def layout(self, x: Any) -> str:
        if not is_sparse(x):
            return ""
        layout = _layout_of(x)
        return type(x).__name__.lower() if layout is None else layout.value

    def take_apart(self, x: Any) -> SparseParts | None:
        layout = _layout_of(x)
        if layout is None:
            return None
        is_coo = layout is Layout.COO
        indices = (x.indices,) if is_coo else (x.indices, x.indptr)
        for one in (x.data, *indices):
            _check_part(one)
        return SparseParts(
            layout,
            tuple(x.shape),
            x.data,
            indices,
            is_sorted=x.indices_sorted,
            is_unique=x.unique_indices,
            batch_axes=x.n_batch,
            dense_axes=x.n_dense,
            padding=_UNPADDED_COO if is_coo else _UNPADDED_CSR,
            count=None if is_coo or x.n_batch else _count(x.indices, x.indptr),
        )

    def put_together(self, parts: SparseParts, like: Any = None) -> Any:
        from jax.experimental import sparse

        make = sparse.BCOO if parts.layout is Layout.COO else sparse.BCSR
        # JAX before 0.8 casts 64-bit parts to 32 bits if x64 is off.
        with registry.framework("jax").runtime.x64_context():
            return make(
                parts.arrays,
                shape=parts.shape,
                indices_sorted=parts.is_sorted,
                unique_indices=parts.is_unique,
            )

    def expressions(self, x: Any) -> Expressions:
        is_rows = _layout_of(x) is Layout.CSR
        coo = "{x}.to_bcoo()" if is_rows else "{x}"
        plain = f"{coo}.update_layout(n_batch=0, n_dense=0)" if hasattr(x, "n_batch") else ""
        if plain and x.n_batch:
            # This also removes the entries that pad batches; their indices are out of bounds.
            plain = f"{plain}.sum_duplicates(remove_zeros=False)"
        return Expressions("{x}.data", _conversions(x), plain=plain)


# Expressions that remove entries whose indices are out of bounds. JAX ignores these entries. The expressions
# also sum duplicates.
_UNPADDED_COO = "{x}.sum_duplicates(remove_zeros=False)"
_UNPADDED_CSR = f"{_MODULE}.BCSR.from_bcoo({{x}}.to_bcoo().sum_duplicates(remove_zeros=False))"


def _layout_of(x: Any) -> Layout | None:
    sparse = sys.modules[_MODULE]
    if isinstance(x, sparse.BCOO):
        return Layout.COO
    return Layout.CSR if isinstance(x, sparse.BCSR) else None


def _conversions(x: Any) -> dict[Layout, str]:
    """Return the expressions that convert ``x`` to other layouts, including those for the older classes."""
    rows = f"{_MODULE}.BCSR(({{x}}.data, {{x}}.indices, {{x}}.indptr), shape={{x}}.shape"
    match type(x).__name__:
        case "BCSR":
            return {Layout.COO: "{x}.to_bcoo()"}
        case "BCOO" if len(x.shape) == 2:
            return {Layout.CSR: f"{_MODULE}.BCSR.from_bcoo({{x}})"}
        case "CSR":
            return {Layout.CSR: f"{rows})", Layout.COO: f"{rows}).to_bcoo()"}
        case "CSC":  # its columns are the rows of the transpose
            return {Layout.COO: f"{rows}[::-1]).to_bcoo().T"}
        case "COO":
            pairs = "jax.numpy.stack([{x}.row, {x}.col], axis=1)"
            return {Layout.COO: f"{_MODULE}.BCOO(({{x}}.data, {pairs}), shape={{x}}.shape)"}
    return {}


def _check_part(x: Any) -> None:
    """Raise for a part that is not an array; ``jax.tree.map`` can replace parts with any object."""
    if not isinstance(x, jax.Array):
        raise ArrayNotSupportedError(
            f"Cannot convert a sparse JAX array that contains a {type(x).__qualname__} in place of an array.",
            source_type="jax",
            reason=f"a part of it is a {type(x).__qualname__}",
            advice="Its parts must be JAX arrays.",
        )


def _count(indices: jax.Array, pointers: jax.Array) -> int | None:
    """Return the number of entries of a BCSR array, without padding; None if it has no padding.

    Also return None for traced, deleted and multi-process arrays, which cannot be read.
    """
    if isinstance(pointers, jax.core.Tracer) or pointers.is_deleted() or not pointers.is_fully_addressable:
        return None
    count = int(np.asarray(pointers)[-1])
    return None if count == indices.shape[0] else count

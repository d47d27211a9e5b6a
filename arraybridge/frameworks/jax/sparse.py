"""JAX sparse arrays: `jax.experimental.sparse`."""

from __future__ import annotations

import sys
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from arraybridge.errors import ArrayNotSupportedError
from arraybridge.host import dtype_names
from arraybridge.interface import registry
from arraybridge.interface.sparse import ANY_DTYPE, Expressions, Layout, SparseArrays, SparseParts
from arraybridge.interface.unsupported import is_sub_byte, wider_dtype

__all__ = ["JaxSparse", "is_sparse"]

_MODULE = "jax.experimental.sparse"


def is_sparse(x: Any) -> bool:
    """Return whether ``x`` is a JAX sparse array, without importing anything."""
    # The class is missing while another thread is importing the module.
    return isinstance(x, getattr(sys.modules.get(_MODULE), "JAXSparse", ()))


class JaxSparse(SparseArrays):
    """JAX's BCSR and BCOO arrays. The older classes CSR, CSC and COO (jax-ml/jax#14631) are not supported."""

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
            has_padding=True,
            count=None if is_coo or x.n_batch else _count(x.indices, x.indptr),
        )

    def put_together(self, parts: SparseParts, like: Any = None) -> Any:
        from jax.experimental import sparse

        make = sparse.BCOO if parts.layout is Layout.COO else sparse.BCSR
        # JAX before 0.8 casts 64-bit parts to 32 bits if x64 is off (jax-ml/jax#7576).
        with registry.framework("jax").runtime.x64_context():
            return make(
                parts.arrays,
                shape=parts.shape,
                indices_sorted=parts.is_sorted,
                unique_indices=parts.is_unique,
            )

    def without_padding(self, x: Any) -> str:
        return _clean_code(x, _summable(x.dtype), coo=False)

    def expressions(self, x: Any) -> Expressions:
        dtype = _summable(x.dtype)
        if _layout_of(x) is None:
            data = _data(dtype)
            return Expressions(data, _conversions(x, data), "", elements="{x}.data", dtype=dtype)
        flaws = _flaws(x)
        has_sum = flaws.has_negative or flaws.has_padding or x.n_batch
        kept = "" if x.dtype == bool and not has_sum else dtype
        if flaws.has_offset:
            return Expressions(_data(kept), {}, "", elements="{x}.data", dtype=kept)
        plain = _clean_code(x, kept, coo=True)
        layouts = {Layout.COO: plain}
        if len(x.shape) == 2:
            layouts[Layout.CSR] = f"{_MODULE}.BCSR.from_bcoo({plain})"
        dense = f"{_clean_code(x, dtype, coo=True)}.todense()"  # a sum
        return Expressions(_data(kept), layouts, dense, plain, "{x}.data", kept)


def _summable(dtype: Any) -> str:
    """Return a dtype that JAX can sum, for elements whose dtype it cannot sum; ``""`` for other dtypes."""
    # JAX 0.10 cannot sum bools, not even in todense() (jax-ml/jax#18427, closed as not planned).
    name = dtype_names.name_of(np.dtype(dtype))
    if is_sub_byte(name):
        return wider_dtype(name)
    return "uint8" if name == "bool" else ""


def _data(dtype: str) -> str:
    """Return the expression for the values of an array, cast to ``dtype`` unless that is ``""``."""
    return f'{{x}}.data.astype("{dtype}")' if dtype else "{x}.data"


def _clean_code(x: Any, dtype: str, *, coo: bool) -> str:
    """Return an expression for the same array without padding and negative indices, with duplicates summed.

    JAX ignores entries whose indices are too large (jax-ml/jax#8225), and counts negative indices from the
    end.

    Args:
        x: A BCOO or BCSR array.
        dtype: The dtype to cast its values to; ``""`` for no cast.
        coo: Whether the result is a BCOO array without batch axes and dense axes.
    """
    is_rows = _layout_of(x) is Layout.CSR
    flaws = _flaws(x)
    code = _rebuild_code(dtype, is_rows=is_rows, wraps=flaws.has_negative)
    if is_rows:
        code += ".to_bcoo()"
    if coo and (x.n_batch or x.n_dense):
        code += ".update_layout(n_batch=0, n_dense=0)"
    if flaws.has_padding or flaws.has_negative or (coo and x.n_batch):  # update_layout pads batches
        code += ".sum_duplicates(remove_zeros=False)"
    return f"type({{x}}).from_bcoo({code})" if is_rows and not coo else code


def _rebuild_code(dtype: str, *, is_rows: bool, wraps: bool) -> str:
    """Return an expression for an array with cast values, and with nonnegative indices if ``wraps``."""
    if not dtype and not wraps:
        return "{x}"
    indices = "{x}.indices"
    if wraps:
        extents = "{x}.shape[{x}.n_batch + 1]" if is_rows else _EXTENTS
        indices = f"np.where({indices} < 0, {indices} + {extents}, {indices})"
    pointers = ", {x}.indptr" if is_rows else ""
    return f"type({{x}})(({_data(dtype)}, {indices}{pointers}), shape={{x}}.shape)"


_EXTENTS = "np.array({x}.shape[{x}.n_batch : {x}.n_batch + {x}.n_sparse])"


class _Flaws(NamedTuple):
    """The properties of indices and pointers that only JAX supports."""

    has_negative: bool = False
    has_padding: bool = False
    has_offset: bool = False


def _flaws(x: Any) -> _Flaws:
    """Return the flaws of an array; none if its indices cannot be read."""
    if not all(map(_is_readable, (x.indices, x.data))):
        return _Flaws()
    indices = np.asarray(x.indices)
    has_negative = bool((indices < 0).any())
    if _layout_of(x) is Layout.COO:
        extents = x.shape[x.n_batch : x.n_batch + x.n_sparse]
        return _Flaws(has_negative, bool((indices >= extents).any()))
    pointers = np.asarray(x.indptr)
    is_complete = bool((pointers[..., -1] == indices.shape[-1]).all())
    has_padding = not is_complete or bool((indices >= x.shape[x.n_batch + 1]).any())
    return _Flaws(has_negative, has_padding, bool((pointers[..., 0] != 0).any()))


def _is_readable(x: jax.Array) -> bool:
    """Return whether an array has values in this process, unlike traced and deleted arrays."""
    return not isinstance(x, jax.core.Tracer) and not x.is_deleted() and x.is_fully_addressable


def _layout_of(x: Any) -> Layout | None:
    sparse = sys.modules[_MODULE]
    if isinstance(x, sparse.BCOO):
        return Layout.COO
    return Layout.CSR if isinstance(x, sparse.BCSR) else None


def _conversions(x: Any, data: str) -> dict[Layout, str]:
    """Return the expressions that convert an array of the older classes to other layouts."""
    rows = f"{_MODULE}.BCSR(({data}, {{x}}.indices, {{x}}.indptr), shape={{x}}.shape"
    match type(x).__name__:
        case "CSR":
            return {Layout.CSR: f"{rows})", Layout.COO: f"{rows}).to_bcoo()"}
        case "CSC":  # its columns are the rows of the transpose
            return {Layout.COO: f"{rows}[::-1]).to_bcoo().T"}
        case "COO":
            pairs = "jax.numpy.stack([{x}.row, {x}.col], axis=1)"
            return {Layout.COO: f"{_MODULE}.BCOO(({data}, {pairs}), shape={{x}}.shape)"}
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
    if not _is_readable(pointers):
        return None
    count = int(np.asarray(pointers)[-1])
    return None if count == indices.shape[0] else count

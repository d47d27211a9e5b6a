"""Convert sparse arrays: take them apart, convert each dense part, and put the parts together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from arraybridge.advice import Advice, Cast
from arraybridge.conversion.fitting_advice import fit_code
from arraybridge.conversion.request import Decision, Request
from arraybridge.conversion.typed_errors import copy_required_error, graph_required_error
from arraybridge.device import Device
from arraybridge.errors import ArrayNotSupportedError, DtypeNotSupportedError, MemoryConversionError
from arraybridge.formatting import format_bytes, format_count
from arraybridge.host import buffers, dtype_names
from arraybridge.interface.devices import CPU
from arraybridge.interface.framework import Framework
from arraybridge.interface.sparse import Expressions, Layout, SparseParts
from arraybridge.interface.streams import identity
from arraybridge.reasons import Cause, Reason
from arraybridge.route import Method, Route, copy_method

__all__ = ["SparseConversion"]

#: A function that decides how one array is converted.
Decide = Callable[[Any, Request], Decision]
#: A function that converts one array.
ConvertPart = Callable[[Any, Request], Any]

_INT64 = "int64"
# The maximum number of plan keys of one call signature.
_MOST_KEYS = 512
_TO_HOST = Request("numpy")
_dtype_of = attrgetter("dtype")


@dataclass(slots=True, eq=False)
class _Part:
    """A dense component of a sparse array, and how to convert it.

    Attributes:
        array: The dense array.
        request: The target and the options of its conversion.
        nbytes: The size of the component in bytes; None for the size of ``array``.
        cause: The reason for an additional copy before or after the conversion, or None.
        index_dtype: The dtype that indices are cast to because the target requires it; ``""`` for no cast.
    """

    array: Any
    request: Request
    nbytes: int | None = None
    cause: Cause | None = None
    index_dtype: str = ""


class SparseConversion:
    """The conversion of sparse arrays to another framework, device or dtype, including plain copies.

    Args:
        source: The framework of the arrays.
        target: The framework of the results.
        request: The request, in which ``gpu_id`` is None and ``dtype`` is a name or None.
        decide: The function that decides how a part is converted.
    """

    __slots__ = (
        *("_decide", "_for_indices", "_for_matrix", "_for_values", "_index_dtypes", "_planned"),
        *("request", "source", "target"),
    )

    def __init__(self, source: Framework, target: Framework, request: Request, decide: Decide) -> None:
        self.source = source
        self.target = target
        self.request = request
        self._decide = decide
        self._for_values = replace(request, target=target.name, declared=None)
        self._for_indices = replace(self._for_values, dtype=None)
        # The matrix of COO indices is new, or copied later.
        self._for_matrix = replace(self._for_indices, copy=None)
        # Layout and dtypes of the indices → the dtype that they are cast to, or "".
        self._index_dtypes: dict[Any, str] = {}
        # Plan key of sparse arrays → the dtype of the matrix in which their indices are joined, or "" if each
        # array of indices is converted without a cast.
        self._planned: dict[Hashable, str] = {}

    # -- the decision ------------------------------------------------------------------------------

    def decision(self, x: Any, device: Device, *, stays: bool, cast: str | None) -> Decision:
        """Return the decision for a sparse array, without converting it.

        ``stays`` states whether the array is already in the target framework and on ``device``. ``cast`` is
        the dtype to cast to, or None.

        Raises:
            MemoryConversionError: If the array cannot be converted exactly and as requested.
        """
        source = self.source
        target = self.target
        request = self.request
        if stays and not request.copy and cast is None:
            route = self._route(x, device, "same", 0, source.nbytes(x), Cause(Reason.SAME_OBJECT))
            is_always_same = request.dtype is None and request.device is None
            return Decision(route, source, target, x, identity, _keep if is_always_same else None)
        requires_grad = source.autodiff.requires_grad(x)
        if source is not target and requires_grad and request.grad == "error":
            raise graph_required_error(source, target, is_sparse=True)
        parts = source.sparse.take_apart(x)
        if source is target and (requires_grad or parts is None):
            return self._native_decision(x, device, stays=stays, dtype=cast)
        route = self._route_of_parts(x, self._check_supported(x, parts), device)
        return Decision(route, source, target, x, self._convert_slowly, self.convert)

    def _route(
        self,
        x: Any,
        device: Device,
        method: Method,
        copies: int,
        nbytes: int,
        cause: Cause,
        shares: bool = True,
    ) -> Route:
        return Route(
            self.source.name,
            self.target.name,
            method,
            device,
            shares_memory=shares,
            copies=copies,
            nbytes=nbytes,
            cause=cause,
            layout=self.source.sparse.layout(x),
        )

    def _route_of_parts(self, x: Any, parts: SparseParts, device: Device) -> Route:
        """Return the route of the part with the most copies, with the total size of all parts."""
        try:
            work = self._work(parts, only_route=True)
            values, *indices = work
            routes = [self._route_of_part(values)]
        except MemoryConversionError as error:
            error.advise_about(self.source.sparse.expressions(x).elements)
            raise
        routes += map(self._route_of_part, indices)
        worst = max(routes, key=attrgetter("copies"))
        return replace(
            worst,
            source=self.source.name,
            device=device,
            shares_memory=all(route.shares_memory for route in routes),
            nbytes=sum(self._nbytes(part) for part in work),
            layout=self.source.sparse.layout(x),
        )

    def _nbytes(self, part: _Part) -> int:
        return self.source.nbytes(part.array) if part.nbytes is None else part.nbytes

    def _route_of_part(self, part: _Part) -> Route:
        route = self._decide(part.array, part.request).route
        if part.cause is not None:
            method = copy_method(route.device)
            if self.request.copy is False:
                raise copy_required_error(self.source, self.target, route.device, method, part.cause)
            copies = route.copies + 1
            return replace(
                route, method=method, copies=copies, shares_memory=False, cause=part.cause, steps=None
            )
        if route.method == "same" and self.source is not self.target:
            return replace(route, method="view", cause=Cause(Reason.SHARED_HOST_MEMORY))
        if part.index_dtype and route.code is Reason.CAST_REQUESTED:
            return replace(route, cause=self._index_cause(part.index_dtype))
        return route

    def _index_cause(self, dtype: str) -> Cause:
        return Cause(Reason.INDEX_DTYPE, framework=self.target.sparse.title, dtype=dtype)

    def _native_decision(self, x: Any, device: Device, *, stays: bool, dtype: str | None) -> Decision:
        """Return the decision for an array that its own framework copies, casts or moves as a whole.

        Such an array either requires grad, so that its graph must be preserved, or does not consist of dense
        arrays.
        """
        source = self.source
        method = copy_method(device)
        if dtype is not None:
            source.sparse.check_cast(x, dtype)
            cause = Cause(Reason.CAST_REQUESTED, dtype=dtype)
        else:
            cause = Cause(Reason.COPY_REQUESTED) if stays else Cause(Reason.OTHER_DEVICE, device=str(device))
        if self.request.copy is False:
            raise copy_required_error(source, source, device, method, cause)

        def convert(y: Any) -> Any:
            if not stays:
                y = source.devices.to_device(y, device)
            if dtype is not None:
                return source.cast(y, dtype)
            return source.copy(y) if stays else y

        route = self._route(x, device, method, 1, source.nbytes(x), cause, shares=False)
        return Decision(route, source, source, x, convert)

    # -- the conversion ----------------------------------------------------------------------------

    def _convert_slowly(self, x: Any) -> Any:
        """Convert a sparse array, and make a decision for each part instead of using the plan cache."""
        return self.convert(x, self._convert_part)

    def _convert_part(self, x: Any, request: Request) -> Any:
        return self._decide(x, request)()

    def convert(self, x: Any, convert_part: ConvertPart) -> Any:
        """Return the converted sparse array; ``convert_part`` converts its parts.

        Raises:
            MemoryConversionError: If the array cannot be converted exactly.
        """
        source = self.source
        target = self.target
        if source is not target and source.autodiff.requires_grad(x):
            x = source.autodiff.detach(x)  # `decision` has checked that ``grad`` allows this
        parts = source.sparse.take_apart(x)
        joined = None if parts is None else self._planned.get(_plan_key(parts))
        if parts is None or joined is None:
            parts = self._check_supported(x, parts)
            values, *indices = self._convert_work(x, parts, convert_part)
            if source is target and _are_same((values, *indices), parts.arrays):
                return x
        else:
            values = convert_part(parts.values, self._for_values)
            if joined:
                matrix = _stack(parts.indices, joined, columns_first=target.sparse.columns_first)
                indices = [convert_part(matrix, self._for_matrix)]
            else:
                indices = [convert_part(array, self._for_indices) for array in parts.indices]
            if parts.has_padding:
                self._check_padding(x, parts, convert_part, indices)
        parts.values = values
        parts.indices = tuple(indices)
        return target.sparse.put_together(parts, x if source is target else None)

    def _convert_work(self, x: Any, parts: SparseParts, convert_part: ConvertPart) -> list[Any]:
        """Return the converted values and indices, which may need a cast or another arrangement of axes."""
        work = self._work(parts, only_route=False)
        values, *indices = [convert_part(part.array, part.request) for part in work]
        if self.source is self.target:
            return [values, *indices]
        if self._splits_axes(parts):
            indices = self._axes(indices[0], work[1].index_dtype)
        if parts.has_padding:  # the source framework allows out-of-bounds indices (jax-ml/jax#8225)
            self._check_padding(x, parts, convert_part, indices)
        if parts.count is None and not self._splits_axes(parts) and len(self._planned) < _MOST_KEYS:
            self._plan(parts)
        return [values, *indices]

    def _plan(self, parts: SparseParts) -> None:
        """Add the plan for arrays like these, unless indices are cast one by one or joined on a device."""
        dtype = self._index_dtype(parts)
        if not self._joins_axes(parts):
            if not dtype:
                self._planned[_plan_key(parts)] = ""
        elif self.source.devices.has_only_host:
            self._planned[_plan_key(parts)] = dtype or self._joined_dtype(parts.indices)

    def _joined_dtype(self, axes: tuple[Any, ...]) -> str:
        """Return the dtype of the matrix of COO indices if the target requires none: int64 if they differ."""
        names = {self.source.dtype_name(axis) for axis in axes}
        return names.pop() if len(names) == 1 else _INT64

    def _splits_axes(self, parts: SparseParts) -> bool:
        """Return whether the matrix of COO indices must be split into one array per axis."""
        is_coo = parts.layout is Layout.COO
        return is_coo and self.target.sparse.separates_axes and not self.source.sparse.separates_axes

    def _joins_axes(self, parts: SparseParts) -> bool:
        """Return whether the COO indices, one array per axis, must be joined into a matrix."""
        is_coo = parts.layout is Layout.COO
        return is_coo and self.source.sparse.separates_axes and not self.target.sparse.separates_axes

    def _axes(self, matrix: Any, dtype: str) -> list[Any]:
        """Split an entries × axes matrix of the target framework into one array per axis, in new memory."""
        target = self.target
        if dtype:
            return [target.cast(matrix[:, i], dtype) for i in range(matrix.shape[1])]
        return list(target.copy(matrix.T))  # one allocation for all axes

    # -- the parts ---------------------------------------------------------------------------------

    def _work(self, parts: SparseParts, *, only_route: bool) -> list[_Part]:
        """Return the dense arrays to convert: the values first, then the indices.

        With ``only_route``, COO indices that are joined are represented by an empty matrix.
        """
        values = self._part(parts.values, parts.count, self._for_values)
        dtype = self._index_dtype(parts)
        if self._joins_axes(parts):
            return [values, self._join_axes(parts.indices, dtype, only_route=only_route)]
        if self._splits_axes(parts):
            matrix = parts.indices[0]
            cause = Cause(Reason.SEPARATE_COORDINATES, framework=self.target.sparse.title)
            return [values, _Part(matrix, self._for_matrix, None, cause, dtype)]
        indices = [self._part(array, parts.count, self._for_indices) for array in parts.indices]
        if parts.count is not None:
            # Only compressed layouts have an entry count. Their last array, the pointers, has no spares.
            indices[-1] = self._part(parts.indices[-1], None, self._for_indices)
        if dtype:
            for part in indices:
                self._cast_index(part, dtype)
        return [values, *indices]

    def _cast_index(self, part: _Part, dtype: str) -> None:
        """Request a cast of indices to the dtype that the target needs."""
        source = self.source
        if source.dtype_name(part.array) == dtype:
            return
        if self.request.copy is False:
            is_view = isinstance(part.array, np.ndarray)  # of the entries of another framework
            device = CPU if is_view else source.devices.device_of(part.array)
            raise copy_required_error(source, self.target, device, "host", self._index_cause(dtype))
        part.request = replace(part.request, dtype=dtype)
        part.index_dtype = dtype

    def _part(self, array: Any, count: int | None, request: Request) -> _Part:
        """Return the part for an array, or for its first ``count`` entries if ``count`` is not None."""
        source = self.source
        if count is None or source is self.target:
            return _Part(array, request)
        source.check(array)
        nbytes = count * source.nbytes(array) // max(1, source.shape(array)[0])
        if source.devices.device_of(array).kind == "cpu":
            return _Part(source.host_view(array)[:count], request, nbytes)
        cause = Cause(Reason.SPARE_ENTRIES, source=source.sparse.title)
        part = source.batching.slice_axis(array, 0, 0, count)
        return _Part(part, request, nbytes, cause)

    def _index_dtype(self, parts: SparseParts) -> str:
        """Return the dtype that the indices are cast to, or ``""`` if they keep their dtype."""
        key = parts.layout, *[array.dtype for array in parts.indices]
        dtype = self._index_dtypes.get(key)
        if dtype is None:
            accepted = self.target.sparse.layouts.get(parts.layout)
            dtypes = {self.source.dtype_name(array) for array in parts.indices}
            if not all(name.startswith(("int", "uint")) for name in dtypes):
                raise self._unsupported_error(
                    parts.layout.upper(),
                    f"its indices are not integers, but {' and '.join(sorted(dtypes))}",
                    Advice("Indices must be integers."),
                )
            is_kept = self.source is self.target or not accepted or (len(dtypes) == 1 and dtypes <= accepted)
            dtype = self._index_dtypes[key] = "" if is_kept else _INT64
        return dtype

    def _join_axes(self, axes: tuple[Any, ...], dtype: str, *, only_route: bool) -> _Part:
        """Join COO indices, one array per axis, into a new entries × axes matrix."""
        source = self.source
        dtype = dtype or self._joined_dtype(axes)
        count = source.shape(axes[0])[0]
        nbytes = count * len(axes) * dtype_names.np_dtype(dtype).itemsize
        cause = Cause(Reason.SEPARATE_COORDINATES, framework=source.sparse.title)
        if only_route:
            axes = tuple(axis[:0] for axis in axes)
        if source.devices.device_of(axes[0]).kind == "cpu":
            matrix = _stack(axes, dtype, columns_first=self.target.sparse.columns_first)
            return _Part(matrix, self._for_matrix, nbytes, cause)
        cast = [axis if source.dtype_name(axis) == dtype else source.cast(axis, dtype) for axis in axes]
        return _Part(source.batching.stack(cast).T, self._for_matrix, nbytes, cause)

    # -- unsupported arrays ------------------------------------------------------------------------

    def _check_supported(self, x: Any, parts: SparseParts | None) -> SparseParts:
        """Return the parts of ``x`` if the target supports such arrays.

        Raises:
            ArrayNotSupportedError: If the target does not support the layout, the number of axes, batches or
                dense axes.
            DtypeNotSupportedError: If sparse arrays of the target cannot have the dtype.
        """
        if parts is not None and (self.source is self.target or self._is_surely_supported(parts)):
            return parts
        supported = self.target.sparse
        expressions = self.source.sparse.expressions(x)
        name = self.source.sparse.layout(x).upper()
        if not supported.layouts:
            if parts is not None:
                self._check_values(parts, expressions)
            raise self._only_dense_error(x, parts, name, expressions)
        if parts is None:
            title = self.source.sparse.title
            reason = f"a {type(x).__name__} of {title} does not store arrays of indices and values"
            raise self._unsupported_error(
                name, reason, self._other_layout(x, parts, expressions, len(x.shape))
            )
        if parts.layout not in supported.layouts or (parts.layout.is_compressed and parts.sparse_axes != 2):
            axes = "" if parts.sparse_axes == 2 else f" with {format_count(parts.sparse_axes, 'axis')}"
            reason = (
                f"{supported.title} does not have {name}{axes}, only {', '.join(supported.layouts).upper()}"
            )
            advice = self._other_layout(x, parts, expressions, parts.sparse_axes)
            raise self._unsupported_error(name, reason, advice)
        self._check_axes(x, name, parts, expressions)
        self._check_dtype(parts)
        return parts

    def _check_values(self, parts: SparseParts, expressions: Expressions) -> None:
        """Raise the error for values that no dense array of another framework can have, such as text."""
        try:
            self.source.check(parts.values)
        except MemoryConversionError as error:
            error.advise_about(expressions.elements)
            raise

    def _only_dense_error(
        self, x: Any, parts: SparseParts | None, name: str, expressions: Expressions
    ) -> ArrayNotSupportedError:
        """Return the error for a target without sparse arrays, with advice to pass a dense array."""
        size = format_bytes(int(np.prod(x.shape, dtype=object)) * self._itemsize(x))
        advice = self._values_advice(x, parts, expressions)
        dense = self._fit(expressions.dense, x, expressions, tuple(x.shape))
        if dense:
            text = f"Pass its stored values, {{}}, or convert it to a dense array ({size}): {{}}."
            advice = Advice(text, (*advice.expressions, dense))
        return self._unsupported_error(name, f"{self.target.name} does not have sparse arrays", advice)

    def _values_advice(self, x: Any, parts: SparseParts | None, expressions: Expressions) -> Advice:
        """Return the advice to pass the stored values."""
        shape = None if parts is None else tuple(parts.values.shape)
        code = self._fit(expressions.values, x, expressions, shape)
        if not code:
            return Advice("Pass the real and the imaginary parts of its stored values separately.")
        return Advice("Pass its stored values, {}.", (code,))

    def _fit(self, code: str, x: Any, expressions: Expressions, shape: tuple[int, ...] | None = None) -> str:
        """Return an expression for an array, with the cast and the reshape that the target needs."""
        dtype = expressions.dtype or self.request.dtype or self.source.dtype_name(x)
        return code and fit_code(code, self.source, self.target, dtype, shape)

    def _is_surely_supported(self, parts: SparseParts) -> bool:
        """Return whether a quick check accepts the parts; if not, `_check_supported` decides."""
        supported = self.target.sparse
        return (
            parts.layout in supported.layouts
            and len(parts.shape) == 2
            and not parts.batch_axes
            and not parts.dense_axes
            and supported.dtypes is None
        )

    def _check_axes(self, x: Any, name: str, parts: SparseParts, expressions: Expressions) -> None:
        supported = self.target.sparse
        both_have_dense_axes = supported.has_dense_axes and self.source.sparse.has_dense_axes
        is_plain = not parts.dense_axes or (parts.layout is Layout.COO and both_have_dense_axes)
        if parts.batch_axes or not is_plain:
            what = "batches of sparse arrays" if parts.batch_axes else f"{name} with dense axes"
            plain = self._fit(expressions.plain, x, expressions)
            values = self._values_advice(x, parts, expressions)
            advice = Advice("Pass {}.", (plain,)) if plain else values
            raise self._unsupported_error(name, f"{supported.title} does not have {what}", advice)
        axes = len(parts.shape)
        if axes < supported.least_axes or (supported.most_axes is not None and axes > supported.most_axes):
            reason = f"{supported.title} does not have sparse arrays with {format_count(axes, 'axis')}"
            raise self._unsupported_error(name, reason, self._values_advice(x, parts, expressions))

    def _check_dtype(self, parts: SparseParts) -> None:
        supported = self.target.sparse
        dtype = self.request.dtype or self.source.dtype_name(parts.values)
        if supported.dtypes is None or dtype in supported.dtypes:
            return
        cast = Cast("complex128" if dtype.startswith("complex") else "float64")
        raise DtypeNotSupportedError(
            f"{supported.title} does not have dtype {dtype}, only {', '.join(sorted(supported.dtypes))}.",
            source_type=self.source.name,
            target_type=self.target.name,
            reason=f"{supported.title} does not have dtype {dtype}",
            advice=cast.by_option(),
            cast=cast,
        )

    def _check_padding(
        self, x: Any, parts: SparseParts, convert_part: ConvertPart, converted: Sequence[Any] = ()
    ) -> None:
        """Raise an error for out-of-bounds indices and pointers, which only JAX ignores.

        ``converted`` are the converted indices. Those that are NumPy arrays are not converted again.
        """
        is_read = bool(converted) and isinstance(converted[0], np.ndarray)
        if parts.layout is Layout.COO:
            axes = converted if is_read else convert_part(parts.indices[0], _TO_HOST).T
            is_inside = _are_inside(axes, parts.shape[: parts.sparse_axes])
        else:
            if is_read:
                indices, pointers = converted
            else:
                indices = convert_part(self._part(parts.indices[0], parts.count, _TO_HOST).array, _TO_HOST)
                pointers = convert_part(parts.indices[1], _TO_HOST)
            if pointers[0] != 0:
                advice = Advice("Its first row pointer must be 0.")
                raise self._unsupported_error("CSR", "its row pointers do not begin at 0", advice)
            is_inside = _are_pointers(pointers, len(indices)) and _are_inside([indices], parts.shape[1:2])
        if is_inside:
            return
        name = parts.layout.upper()
        raise self._unsupported_error(
            name,
            "it has entries outside of its shape (padding)",
            Advice("Pass {}, which also sums duplicates.", (self.source.sparse.without_padding(x),)),
        )

    def _other_layout(self, x: Any, parts: SparseParts | None, expressions: Expressions, axes: int) -> Advice:
        """Return the advice to convert the array to a layout that the target supports."""
        for layout in self.target.sparse.layouts:
            code = expressions.layouts.get(layout, "")
            code = self._fit(code, x, expressions) if axes == 2 or layout is Layout.COO else ""
            if code:
                return Advice("Pass {}.", (code,))
        return self._values_advice(x, parts, expressions)

    def _unsupported_error(self, name: str, reason: str, advice: Advice) -> ArrayNotSupportedError:
        source = self.source
        return ArrayNotSupportedError(
            f"Cannot convert a sparse {name} array of {source.sparse.title} to {self.target.name}: {reason}.",
            source_type=source.name,
            target_type=self.target.name,
            reason=reason,
            advice=advice,
        )

    def _itemsize(self, x: Any) -> int:
        return dtype_names.np_dtype(self.source.dtype_name(x)).itemsize


def _plan_key(parts: SparseParts) -> Hashable:
    """Return the properties that determine how the parts of a sparse array are converted."""
    return (
        parts.layout,
        len(parts.shape),
        parts.batch_axes,
        parts.dense_axes,
        parts.count is None,
        parts.values.dtype,
        *map(_dtype_of, parts.indices),
    )


def _keep(x: Any, convert_part: ConvertPart) -> Any:
    """Return the sparse array itself, because it needs no conversion."""
    return x


def _are_inside(axes: Sequence[np.ndarray], shape: tuple[int, ...]) -> bool:
    """Return whether all indices of each axis are within a shape."""
    for indices, extent in zip(axes, shape, strict=True):
        # Negative indices are large as unsigned integers, so the maximum also reveals them. One call per axis
        # is ten times as fast as one call for a matrix, which NumPy reduces row by row.
        if indices.size and np.maximum.reduce(indices.view(f"u{indices.itemsize}")) >= extent:
            return False
    return True


def _are_pointers(pointers: np.ndarray, count: int) -> bool:
    """Return whether pointers do not decrease, and do not exceed the number of entries."""
    return bool(pointers[-1] <= count and (pointers[:-1] <= pointers[1:]).all())


def _are_same(arrays: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(one is other for one, other in zip(arrays, others, strict=True))


def _stack(axes: Sequence[Any], dtype: str, *, columns_first: bool) -> np.ndarray:
    """Return the indices of all axes as a matrix of entries × axes, in memory that the target can share."""
    elements = dtype_names.np_dtype(dtype)
    if columns_first:
        return np.array(axes, elements).T  # a third of the time of `allocate_aligned`
    matrix = buffers.allocate_aligned((len(axes[0]), len(axes)), elements)
    for i, axis in enumerate(axes):
        matrix[:, i] = axis
    return matrix

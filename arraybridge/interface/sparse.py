"""The interface for sparse arrays: a layout and dense parts, which are converted like other arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

__all__ = ["NO_SPARSE_ARRAYS", "Expressions", "Layout", "SparseArrays", "SparseParts"]


class Layout(StrEnum):
    """The storage layout of a sparse array."""

    CSR = "csr"
    CSC = "csc"
    COO = "coo"
    #: Compressed rows of dense blocks.
    BSR = "bsr"
    #: Compressed columns of dense blocks.
    BSC = "bsc"

    @property
    def is_compressed(self) -> bool:
        """Whether indices are stored for one axis only, with pointers to the start of each row or column."""
        return self in _COMPRESSED

    @property
    def has_blocks(self) -> bool:
        """Whether each entry is a dense block."""
        return self in _BLOCKED


_COMPRESSED = frozenset((Layout.CSR, Layout.CSC, Layout.BSR, Layout.BSC))
_BLOCKED = frozenset((Layout.BSR, Layout.BSC))

#: The index dtypes of most compressed layouts.
INT32_OR_INT64 = frozenset(("int32", "int64"))
#: The index dtype of most COO arrays.
INT64 = frozenset(("int64",))
#: No restriction: indices and pointers may have any integer dtypes, which may differ.
ANY_DTYPE = frozenset[str]()


@dataclass(slots=True, eq=False)
class SparseParts:
    """The dense arrays and metadata that make up a sparse array.

    Attributes:
        layout: The layout.
        shape: The shape of the whole array.
        values: The stored values: one row per entry, followed by the axes of blocks and by dense axes.
        indices: For compressed layouts, the indices and the pointers. For COO, a matrix of entries × axes, or
            one array per axis.
        is_sorted: Whether the array states that its indices are sorted (COO: by the first axis, then by the
            next).
        is_unique: Whether the array states that it has no duplicates.
        batch_axes: The number of leading batch axes; each index along them selects a separate sparse array.
        dense_axes: The number of trailing axes along which every entry is dense.
        has_padding: Whether the framework allows entries with indices out of bounds.
        count: The number of entries if values and indices have space for more, otherwise None.
    """

    layout: Layout
    shape: tuple[int, ...]
    values: Any
    indices: tuple[Any, ...]
    is_sorted: bool = False
    is_unique: bool = False
    batch_axes: int = 0
    dense_axes: int = 0
    has_padding: bool = False
    count: int | None = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The dense arrays: the values first, then the indices."""
        return (self.values, *self.indices)

    @property
    def sparse_axes(self) -> int:
        """The number of axes that are neither batch axes nor dense axes."""
        return len(self.shape) - self.batch_axes - self.dense_axes


class Expressions(NamedTuple):  # a dataclass would add 2% to the time of `import arraybridge`
    """Expressions for the advice in errors, in which ``{x}`` is a sparse array.

    Attributes:
        values: Returns the stored values as a dense array.
        layouts: Layout → the expression that converts ``{x}`` to this layout without densifying.
        dense: Returns the dense array; ``""`` if no expression does so.
        plain: Returns the same array without batch axes and dense axes; ``""`` if no expression does so.
        elements: Returns the array that advice about dtypes and masks applies to; ``""`` for ``{x}`` itself.
        dtype: The dtype of the other results, if it differs from that of ``{x}``; ``""`` if it does not.
    """

    values: str
    layouts: Mapping[Layout, str]
    dense: str = "{x}.todense()"
    plain: str = ""
    elements: str = ""
    dtype: str = ""


class SparseArrays:
    """Sparse arrays of a framework. The defaults fit a framework without sparse arrays.

    Attributes:
        layouts: Supported layout → its index dtypes (`ANY_DTYPE`: all), the preferred layout first.
        dtypes: The dtypes of values; None for all dtypes of the framework.
        title: The name of the sparse arrays in messages, such as ``"scipy.sparse"``.
        has_own_classes: Whether sparse arrays have separate classes, so that no class has both sparse and
            dense arrays.
        has_matrices: Whether some classes are matrices, for which ``*`` is matrix multiplication.
        has_dense_axes: Whether COO arrays may have dense trailing axes.
        separates_axes: Whether COO arrays have one index array per axis, instead of a matrix.
        columns_first: Whether the index matrix of COO arrays is stored as axes × entries.
        least_axes: The minimum number of axes of COO arrays.
    """

    layouts: ClassVar[Mapping[Layout, frozenset[str]]] = {}
    dtypes: ClassVar[frozenset[str] | None] = None
    title: ClassVar[str] = ""
    has_own_classes: ClassVar[bool] = True
    has_matrices: ClassVar[bool] = False
    has_dense_axes: ClassVar[bool] = False
    separates_axes: ClassVar[bool] = False
    columns_first: ClassVar[bool] = False
    least_axes: ClassVar[int] = 1

    @property
    def most_axes(self) -> int | None:
        """The maximum number of axes of COO arrays; None for any number."""
        return None

    def layout(self, x: Any) -> str:
        """Return the layout of a sparse array, without reading values; ``""`` for a dense array."""
        return ""

    def take_apart(self, x: Any) -> SparseParts | None:
        """Return the parts of a sparse array, which share its memory if possible.

        The result is None for layouts that do not consist of arrays. This method is only called for sparse
        arrays.
        """
        return None

    def put_together(self, parts: SparseParts, like: Any = None) -> Any:
        """Return a sparse array that consists of ``parts``, arrays of the framework, without copying them.

        If several classes have the layout, the class of ``like``, a sparse array of the framework, determines
        the class of the result.
        """
        raise NotImplementedError

    def check_cast(self, x: Any, dtype: str) -> None:
        """Raise `DtypeNotSupportedError` if a sparse array that does not consist of arrays cannot be cast."""

    def without_padding(self, x: Any) -> str:
        """Return the expression for a sparse array ``{x}`` without indices out of bounds, for advice."""
        raise NotImplementedError

    def expressions(self, x: Any) -> Expressions:
        """Return the expressions for advice about a sparse array."""
        raise NotImplementedError


NO_SPARSE_ARRAYS = SparseArrays()

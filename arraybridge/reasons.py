"""Reasons why an array is shared, copied or rejected, and their texts.

Programs compare the `code` of a `Cause`. Its `text` is for people and may change at any time.
"""

from __future__ import annotations

from enum import StrEnum, auto
from functools import lru_cache
from typing import NamedTuple, Self

__all__ = ["DEPENDS_ON_LAYOUT", "Cause", "Reason", "as_cause"]


class Reason(StrEnum):
    """A reason for which a conversion shares memory, copies, or raises an error."""

    #: The text, as a template that is formatted with a `Cause`.
    template: str

    def __new__(cls, name: str, template: str) -> Self:
        """Return a member with its name and the template of its text."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.template = template
        return member

    # -- nothing is copied
    SAME_OBJECT = auto(), "it is already there"
    SHARED_HOST_MEMORY = auto(), "both use the same host memory"
    SHARED_DEVICE_MEMORY = auto(), "both use the memory of {0.device}"
    #: A framework function shares the memory, on the host or on an accelerator.
    SHARED_MEMORY = auto(), "both use the same memory"
    REPLICA_ON_DEVICE = auto(), "one of its replicas is on {0.device}"

    # -- requests by the caller
    COPY_REQUESTED = auto(), "copy=True was passed"
    CAST_REQUESTED = auto(), "a cast to {0.dtype} was requested"
    INTO_OUTPUT = auto(), "out= was passed"

    # -- the layout of the memory
    NOT_C_CONTIGUOUS = auto(), "it is not C-contiguous"
    NOT_COMPACT = auto(), "it is not a permutation of a compact array, and XLA supports no other strides"
    STRIDES_IGNORED = auto(), "this version of JAX ignores strides on import"
    NEGATIVE_STRIDES = auto(), "{0.framework} does not support negative strides"
    STRIDE_MULTIPLES = auto(), "its strides are not multiples of the element size"
    MISALIGNED = auto(), "its memory is not aligned to {0.alignment} bytes"
    #: A tensor in a map of a safetensors file, which `save_safetensors` would align.
    MISALIGNED_IN_FILE = auto(), "its place in the safetensors file is not aligned to {0.alignment} bytes"
    #: The memory is not aligned to the size of an element.
    MISALIGNED_ELEMENTS = auto(), "{0.framework} needs {0.dtype} aligned to {0.alignment} bytes"
    BYTE_ORDER = auto(), "it has non-native byte order"
    #: The bools are stored as bytes other than 0 and 1.
    BOOL_BYTES = auto(), "some of its bools are bytes other than 0 and 1, which {0.framework} would misread"

    # -- unsafe writes
    READ_ONLY = auto(), "it is read-only{0.danger}"
    READ_ONLY_FILE_MAP = auto(), "it is a read-only map of a file{0.danger}"
    CACHED_SCALAR = auto(), "{0.source} may cache scalars, and {0.framework} could write to it"
    REPLICATED = auto(), "it is replicated over several devices, and {0.framework} could write to one replica"

    # -- the framework
    LAZY_VALUES = auto(), "its conj or neg bit is set"
    FLOAT8 = auto(), "TensorFlow imports float8 only by copying"
    COPIES_ONLY = auto(), "{0.framework} imports host memory only by copying"
    MANAGED_MEMORY = auto(), "it is in managed memory"
    SEVERAL_SHARDS = auto(), "it is sharded over several devices"

    # -- the device
    NO_SHARED_MEMORY = (
        auto(),
        "{0.source} on {0.source_device} and {0.framework} on {0.device} do not share memory",
    )
    OTHER_DEVICE = auto(), "{0.device} is a different device{0.origin}"
    SEPARATE_MEMORY = auto(), "{0.device} has separate memory"
    #: No installed framework can read memory of this kind.
    UNREADABLE_DEVICE = auto(), "no installed framework reads memory on {0.source_device}"

    # -- the object that carries the array
    FILE = auto(), "it is read from {0.source}"
    SEPARATE_COLUMNS = auto(), "the columns of the table are not adjacent in memory"
    MASKED_STORAGE = auto(), "{0.source} stores {0.source_dtype} with a mask"
    CHUNKED_STORAGE = auto(), "{0.source} stores it in several chunks"
    PACKED_BITS = auto(), "{0.source} stores booleans as bits"
    CARRIER_COPIES = auto(), "{0.source} returns a copy of its pixels"
    LIBRARY_COPIES = auto(), "its library copies it to the host from {0.source_device}"
    #: The object makes new memory on each access.
    NEW_MEMORY = auto(), "its __array_interface__ returns other memory on each access"
    NUMPY_SCALAR = auto(), "a NumPy scalar has no memory to share"

    # -- conversions by the frameworks' own calls
    NATIVE_COPY = auto(), "{0.call} copies, although the memory could be shared"
    NATIVE_CAST = auto(), "it is a cast to {0.dtype}"
    NARROWED = auto(), "it is narrowed from {0.source_dtype} to {0.dtype}, since JAX's x64 is off"
    RESHARDED = auto(), "it is redistributed over devices"

    # -- conversions that raise an error
    REQUIRES_GRAD = auto(), "it requires grad"
    OTHER_SOURCE = auto(), "the declared source is {0.framework}, but the array belongs to {0.source}"
    NO_DEVICE = auto(), "{0.framework} has no device"

    # -- the parts of a sparse array
    #: One framework stores an array of coordinates per axis, the other one a matrix of coordinates.
    SEPARATE_COORDINATES = auto(), "{0.framework} stores COO indices as one array per axis"
    INDEX_DTYPE = auto(), "{0.framework} stores the indices of this layout as {0.dtype}"
    #: There are entries after the last row pointer, which are omitted.
    SPARE_ENTRIES = auto(), "{0.source} has space for more entries than are used"

    #: A reason that a plug-in provides as text.
    OTHER = auto(), "{0.words}"

    # Enum.__hash__ is written in Python and takes three times as long.
    __hash__ = str.__hash__


#: Reasons whose advice depends on the layout of the array.
DEPENDS_ON_LAYOUT = frozenset(
    (
        Reason.NOT_C_CONTIGUOUS,
        Reason.NOT_COMPACT,
        Reason.STRIDES_IGNORED,
        Reason.NEGATIVE_STRIDES,
        Reason.STRIDE_MULTIPLES,
        Reason.MISALIGNED,
        Reason.MISALIGNED_ELEMENTS,
    )
)


class Cause(NamedTuple):  # creating a frozen dataclass with ten fields takes five times as long
    """A reason with the details that its text contains.

    Attributes:
        code: The kind of reason.
        framework: The framework that cannot share the memory, or could write to it.
        source: The framework of the array, or the object that the array is read from.
        device: The device of the result.
        source_device: The device of the array.
        dtype: The dtype of the result.
        source_dtype: The dtype of the array.
        alignment: The alignment in bytes that ``framework`` needs.
        call: The framework's own call, such as ``"jnp.asarray"``.
        words: The text of `Reason.OTHER`, which follows "because".

    >>> Cause(Reason.MISALIGNED, alignment=64).text
    'its memory is not aligned to 64 bytes'
    """

    code: Reason
    framework: str = ""
    source: str = ""
    device: str = ""
    source_device: str = ""
    dtype: str = ""
    source_dtype: str = ""
    alignment: int = 0
    call: str = ""
    words: str = ""

    @property
    def text(self) -> str:
        """The reason as a clause that follows "because"."""
        template = self.code.template
        return _format(template, self) if "{" in template else template

    @property
    def danger(self) -> str:
        """The clause about writes by ``framework``, for the texts of read-only memory."""
        return f", and {self.framework} could write to it" if self.framework else ""

    @property
    def origin(self) -> str:
        """The phrase about ``source_device``, for the text of another device."""
        return f" from {self.source_device}" if self.source_device else ""


@lru_cache  # a trace has many routes and few causes, and formatting takes 0.6 µs
def _format(template: str, cause: Cause) -> str:
    return template.format(cause)


def as_cause(cause: Cause | str | None) -> Cause | None:
    """Return a reason from a framework or carrier as a `Cause`. Plug-ins may provide it as text."""
    if not cause:
        return None
    return Cause(Reason.OTHER, words=cause) if isinstance(cause, str) else cause

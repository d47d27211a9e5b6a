"""The component `Runtime`: settings, pytrees, profilers and namespaces of a framework, and its traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from arraybridge.device import Device
from arraybridge.interface.component import Component

if TYPE_CHECKING:
    from arraybridge.interface.metadata import FrameworkMetadata

__all__ = ["NO_CONTEXT", "Runtime"]

#: A context manager that does nothing. It may be entered several times.
NO_CONTEXT: AbstractContextManager[None] = nullcontext()


class Pytree(NamedTuple):  # a dataclass would add 2% to the time of `import arraybridge`
    """One level of an object whose class is registered as a pytree with a framework.

    Attributes:
        children: The child values of the object.
        places: The path from the object to each child, such as ``.x``.
        structure: The rest of the object. It is equal for objects of the same structure.
        rebuild: A function that returns a similar object with other children.
    """

    children: Sequence[Any]
    places: Sequence[str]
    structure: Any
    rebuild: Callable[[Sequence[Any]], Any]


class OneLevel:
    """An ``is_leaf`` function that flattens a single level: every node except the first is a leaf.

    It can therefore flatten an object that contains itself, without infinite recursion.
    """

    __slots__ = ("_has_root",)

    def __init__(self) -> None:
        self._has_root = False

    def __call__(self, node: Any) -> bool:
        is_leaf = self._has_root
        self._has_root = True
        return is_leaf


class Runtime(Component):
    """Settings, context managers and namespaces for running the framework's functions.

    Attributes:
        metadata: Package metadata that is needed before the package is imported. None if ``name`` and
            ``modules`` are sufficient.
        settings: Thread settings that change results. Each is a pair of functions: one returns the current
            value, the other returns a context manager that applies a value.
        namespace: The module that is the array API namespace for its arrays; ``""`` if there is none.
        is_asynchronous: Whether a call may return a host array before its values are computed.
        has_strides: Whether the framework's own functions accept arrays with any strides.
        narrows_64_bit: Whether the framework's functions narrow 64-bit dtypes by default.
    """

    metadata: ClassVar[FrameworkMetadata | None] = None
    settings: ClassVar[Sequence[tuple[Callable[[], Any], Callable[[Any], AbstractContextManager[Any]]]]] = ()
    namespace: ClassVar[str] = ""
    is_asynchronous: ClassVar[bool] = False
    has_strides: ClassVar[bool] = False
    narrows_64_bit: ClassVar[bool] = False

    def observe(self, x: Any) -> tuple[Any, int, int | None, Device]:
        """Return the dtype, the size, the address and the device of an array, for a trace.

        Args:
            x: An array of the framework.

        Returns:
            A tuple ``(dtype, nbytes, address, device)``. The size is in bytes. The address is None for an
            array on several devices.

        Raises:
            MemoryConversionError: If the array has no memory.
        """
        framework = self.framework
        framework.check(x)
        address = framework.interchange.address(x)
        return framework.dtype_name(x), framework.nbytes(x), address, framework.devices.device_of(x)

    def is_idle(self) -> bool:
        """Return whether no computation can be pending."""
        return False

    def pause_observation(self) -> AbstractContextManager[Any]:
        """Return a context manager within which reading arrays runs no code of the traced program."""
        return NO_CONTEXT

    def open_pytree(self, x: Any) -> Pytree | None:
        """Return one level of an object whose class is registered as a pytree with the framework.

        Args:
            x: Any object.

        Returns:
            The children and the structure of ``x``; None if its class is not registered.
        """
        return None

    def device_guard(self, x: Any) -> AbstractContextManager[Any]:
        """Return a context manager for calling the framework's functions with ``x``.

        Within it, the functions accept ``x`` and keep 64-bit dtypes.

        Args:
            x: An array of the framework.

        Returns:
            A context manager. By default, the one that `x64_context` returns.
        """
        return self.x64_context()

    def isolate(self) -> AbstractContextManager[Any]:
        """Return a context manager for a conversion from or to another framework.

        Within it, modes and transforms of the caller do not change what the framework's functions return.

        Returns:
            A context manager. By default, it does nothing.
        """
        return NO_CONTEXT

    def array_classes(self) -> tuple[type, ...]:
        """Return the array classes, or their base classes, for libraries that dispatch by class."""
        return self.framework.fast_path.fast_types()

    def array_namespace(self) -> Any:
        """Return the array API namespace for the framework's arrays; None if there is none.

        By default, this method imports the module `namespace`.
        """
        return import_module(self.namespace) if self.namespace else None

    def thread_settings(self) -> Callable[[], AbstractContextManager[Any]]:
        """Capture the settings of the current thread.

        Returns:
            A function that returns a context manager, which applies these settings to the thread that enters
            it.
        """
        captured = [(current, apply, current()) for current, apply in self.settings]

        @contextmanager
        def applied() -> Iterator[None]:
            with ExitStack() as stack:
                for current, apply, value in captured:
                    if current() != value:
                        stack.enter_context(apply(value))
                yield

        return applied

    def x64_context(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context manager within which arithmetic keeps 64-bit dtypes, or not.

        Args:
            enabled: Whether 64-bit dtypes are enabled. A framework that always keeps them ignores it.
        """
        return NO_CONTEXT

    def narrows(self, x: Any) -> bool:
        """Return whether the framework's functions would currently compute with fewer bits than ``x`` has.

        Args:
            x: An array of the framework.
        """
        return False

    def annotation(self, name: str) -> AbstractContextManager[Any]:
        """Return a context manager that records a span in the framework's profiler.

        Args:
            name: The label of the span.

        Returns:
            A context manager. It does nothing if the framework has no profiler.
        """
        return nullcontext()

    def late_errors(self, cls: type) -> Callable[[Any], object] | None:
        """Return a function that waits for an array and raises any error that its computation caused.

        Args:
            cls: The class of the array.

        Returns:
            A function of one array; None if arrays of this class do not raise errors late.
        """
        return None

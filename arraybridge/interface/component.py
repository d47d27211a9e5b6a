"""`Component`, the base class of the parts of a framework that have defaults.

Modules of components import nothing from `arraybridge.interface.framework`, which imports them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

if TYPE_CHECKING:
    import numpy as np

    from arraybridge.device import Device
    from arraybridge.reasons import Cause

__all__ = ["Component", "FrameworkBase", "component"]


class FrameworkBase:
    """The members of `Framework` that components use, for type checkers. Only `Framework` derives from it."""

    if TYPE_CHECKING:
        name: ClassVar[str]
        modules: ClassVar[tuple[str, ...]]
        alignment: ClassVar[int]
        has_host: ClassVar[bool]
        max_rank: ClassVar[int]
        devices: Any
        interchange: Any
        fast_path: Any
        runtime: Any
        batching: Any
        streams: Any
        sparse: Any

        def check(self, x: Any) -> None: ...
        def dtype_name(self, x: Any) -> str: ...
        def shape(self, x: Any) -> tuple[int, ...]: ...
        def nbytes(self, x: Any) -> int: ...
        def host_view(self, x: Any) -> np.ndarray: ...
        def to_host(self, x: Any) -> np.ndarray: ...
        def from_host(self, view: np.ndarray, device: Device) -> Any: ...
        def cannot_view(self, view: np.ndarray) -> Cause | str | None: ...
        def copy(self, x: Any) -> Any: ...


class Component:
    """The base class of the components of a framework. Their methods have defaults.

    Attributes:
        framework: The framework that the component belongs to.
    """

    framework: FrameworkBase

    def __init__(self, framework: FrameworkBase) -> None:
        self.framework = framework


C = TypeVar("C", bound=Component)


class component(Generic[C]):  # noqa: N801  # used like a function
    """A descriptor that assigns a component to a framework class.

    Each instance of the framework creates its own component on first access.
    """

    def __init__(self, cls: type[C]) -> None:
        self.cls = cls

    def __set_name__(self, owner: type[FrameworkBase], name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type[FrameworkBase]) -> component[C]: ...
    @overload
    def __get__(self, instance: FrameworkBase, owner: type[FrameworkBase]) -> C: ...
    def __get__(self, instance: FrameworkBase | None, owner: type[FrameworkBase]) -> Any:
        if instance is None:
            return self
        created = self.cls(instance)
        vars(instance)[self.name] = created  # the next access finds this attribute first
        return created

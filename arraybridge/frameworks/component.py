"""`Component`, the base class of the parts of a framework that have defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:
    from arraybridge.frameworks.base import Framework

__all__ = ["Component", "component"]


class Component:
    """The base class of the components of a framework. Their methods have defaults.

    Attributes:
        framework: The framework that the component belongs to.
    """

    framework: Framework

    def __init__(self, framework: Framework) -> None:
        self.framework = framework


C = TypeVar("C", bound=Component)


class component(Generic[C]):  # noqa: N801  # used like a function
    """A descriptor that assigns a component to a framework class.

    Each instance of the framework creates its own component on first access.
    """

    def __init__(self, cls: type[C]) -> None:
        self.cls = cls

    def __set_name__(self, owner: type[Framework], name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type[Framework]) -> component[C]: ...
    @overload
    def __get__(self, instance: Framework, owner: type[Framework]) -> C: ...
    def __get__(self, instance: Framework | None, owner: type[Framework]) -> Any:
        if instance is None:
            return self
        created = self.cls(instance)
        vars(instance)[self.name] = created  # the next access finds this attribute first
        return created

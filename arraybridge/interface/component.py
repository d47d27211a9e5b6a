"""`Component`, the base class of the parts of a framework that have defaults.

Modules of components import nothing from `arraybridge.interface.framework`, which imports them.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

__all__ = ["Component", "component"]


class Component:
    """The base class of the components of a framework. Their methods have defaults.

    Attributes:
        framework: The `Framework` that the component belongs to.
    """

    def __init__(self, framework: Any) -> None:
        self.framework = framework


C = TypeVar("C", bound=Component)


class component(Generic[C]):  # noqa: N801  # used like a function
    """A descriptor that assigns a component to a framework class.

    Each instance of the framework creates its own component on first access.
    """

    def __init__(self, cls: type[C]) -> None:
        self.cls = cls

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> component[C]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> C: ...
    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        created = self.cls(instance)
        vars(instance)[self.name] = created  # the next access finds this attribute first
        return created

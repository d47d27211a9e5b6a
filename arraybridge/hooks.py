"""`hooks`: functions of higher layers that lower layers call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arraybridge.types import FrameworkLike


class Hooks:
    """Functions of higher layers that lower layers call, because lower layers do not import higher ones.

    A module that defines one of these functions sets the corresponding attribute on import.

    Attributes:
        native_device: Returns a framework's own object for a `Device`. Set in interface/registry.py.
        read_device: Returns the `Device` that a framework's own device object denotes; None for other
            objects. Set in interface/registry.py. `Device` calls both, so this module does not import it.
        user_line: Returns the file and line of the user's code that called this package. Set in
            tracing/user_lines.py.
        annotate: Returns a context manager that shows the names of operations in a profiler. Set in
            tracing/trace_log.py.
        start_up: Returns a context manager that records the start-up of a framework. Set in
            tracing/trace_log.py.
        decorator_of: Returns the decorator of a framework. Set in decorators/framework_decorators.py.
    """

    __slots__ = ("annotate", "decorator_of", "native_device", "read_device", "start_up", "user_line")

    native_device: Callable[[Any, FrameworkLike], Any]
    read_device: Callable[[Any], Any]
    user_line: Callable[[], tuple[str, int]]
    annotate: Callable[[str], AbstractContextManager[None]]
    start_up: Callable[[str], AbstractContextManager[None]]
    decorator_of: Callable[[str], Any]


hooks = Hooks()

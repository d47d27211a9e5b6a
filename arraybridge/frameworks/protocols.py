"""Objects that export memory through a single array protocol."""

from __future__ import annotations

from typing import Any


class Exported:
    """An object that exports memory through array protocols, such as ``__array_interface__``.

    Attributes:
        owner: An object that must live as long as the memory is used.
    """

    def __init__(self, owner: Any = None, **protocols: Any) -> None:
        self.owner = owner
        vars(self).update(protocols)


class Importable:
    """A DLPack capsule in the form that ``from_dlpack`` functions accept. It ignores the requested stream.

    ``device`` is DLPack's: ``(1, 0)`` for host memory, ``(2, i)`` for CUDA device ``i``.
    """

    def __init__(self, exported: Any, device: tuple[int, int] = (1, 0)) -> None:
        self._exported = exported
        self._device = device

    def __dlpack__(self, **_: Any) -> Any:
        return self._exported

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

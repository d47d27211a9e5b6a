"""Objects that export memory by an array protocol alone."""

from __future__ import annotations

from typing import Any


class Exported:
    """Memory by an array protocol alone: an attribute of that name; ``owner`` has to live as long as it."""

    def __init__(self, owner: Any = None, **protocols: Any) -> None:
        self.owner = owner
        vars(self).update(protocols)


class Importable:
    """A capsule in the form that ``from_dlpack`` functions take, whatever stream they name.

    ``device`` is DLPack's: ``(1, 0)`` for host memory, ``(2, i)`` for a CUDA card.
    """

    def __init__(self, exported: Any, device: tuple[int, int] = (1, 0)) -> None:
        self._exported = exported
        self._device = device

    def __dlpack__(self, **_: Any) -> Any:
        return self._exported

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

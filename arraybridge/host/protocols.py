"""Objects that export memory only through selected array protocols."""

from __future__ import annotations

from typing import Any


class Exported:
    """An object that exports memory through the given array protocols, such as ``__array_interface__``.

    Attributes:
        owner: An object that must live as long as the memory is used.
    """

    def __init__(self, owner: Any = None, **protocols: Any) -> None:
        self.owner = owner
        vars(self).update(protocols)

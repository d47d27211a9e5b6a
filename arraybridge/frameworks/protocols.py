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

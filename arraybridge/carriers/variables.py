"""Carriers of the variables of neural-network libraries: Keras and Flax."""

from __future__ import annotations

from typing import Any

from arraybridge.carriers.carrier import Carrier, is_of
from arraybridge.frameworks import registry


class Variables(Carrier):
    """Variables of Keras and of Flax (``nnx.Param`` among them), which hold an array of some framework."""

    expression = "{x}.value"

    def carries(self, x: Any) -> bool:
        if is_of(x, "keras", "Variable"):
            return True
        return is_of(x, "flax.nnx", "Variable") and registry.find_owner(self.array(x)) is not None

    def array(self, x: Any) -> Any:
        # Flax deprecates .value since 0.12; the attributes of the value are those of older variables.
        return x.get_value() if hasattr(type(x), "get_value") else x.value

"""The carrier for variables of neural-network libraries: Keras and Flax."""

from __future__ import annotations

from typing import Any

from arraybridge.carriers.carrier import Carrier, is_of
from arraybridge.interface import registry


class Variables(Carrier):
    """A carrier for Keras and Flax variables, such as ``nnx.Param``, with an array of any framework."""

    expression = "{x}.value"

    def carries(self, x: Any) -> bool:
        if is_of(x, "keras", "Variable"):
            return True
        return is_of(x, "flax.nnx", "Variable") and registry.find_owner(self.array(x)) is not None

    def array(self, x: Any) -> Any:
        # Flax 0.12 deprecates .value (google/flax#5019); older variables do not have get_value().
        return x.get_value() if hasattr(type(x), "get_value") else x.value

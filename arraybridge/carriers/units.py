"""The carrier for arrays with units: pint."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraybridge.carriers.carrier import Carrier, contents_error, is_of
from arraybridge.carriers.third_party_arrays import is_protocol_producer
from arraybridge.errors import MemoryConversionError
from arraybridge.interface import registry


class Pint(Carrier):
    """A carrier for arrays of pint. It exists only so that `array` can raise an error, as for other units."""

    expression = "{x}.magnitude"

    def carries(self, x: Any) -> bool:
        if not is_of(x, "pint", "Quantity") or isinstance(x.magnitude, np.generic):
            return False
        return registry.find_owner(x.magnitude) is not None or is_protocol_producer(x.magnitude)

    def array(self, x: Any) -> Any:
        owner = registry.find_owner(x.magnitude)
        try:
            if owner is not None:
                owner.check(x.magnitude)
        except MemoryConversionError as error:  # such as a masked array
            error.advise_about(self.expression)
            raise
        raise contents_error("a pint Quantity", "its unit would be lost", "Pass {}.", self.expression)

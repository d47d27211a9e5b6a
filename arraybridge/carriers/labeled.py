"""The carrier for labeled arrays: xarray."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import Carrier, contents_error
from arraybridge.host import buffers
from arraybridge.interface.installation import package_of
from arraybridge.reasons import Cause, Reason


class Xarray(Carrier):
    """A carrier for xarray arrays with named axes. Datasets have several arrays and are not carriers."""

    expression = "{x}.data"

    def carries(self, x: Any) -> bool:
        xarray = sys.modules["xarray"]
        return isinstance(x, (xarray.DataArray, xarray.Variable))

    def array(self, x: Any) -> Any:
        xarray = sys.modules["xarray"]
        variable = getattr(x, "variable", x)
        values = getattr(variable, "_data", None)
        # Reading `chunks` takes 20 µs longer. The property `data` of a subclass may return other values.
        if type(values) is np.ndarray and type(x) in (xarray.DataArray, xarray.Variable):
            return values
        if x.chunks is not None:
            raise contents_error(
                "a lazy xarray object",
                "its values are computed by Dask",
                "Pass {}, or process its blocks with arraybridge.dask.map_blocks(fn, x.data).",
                "{x}.compute()",
            )
        if _is_unread(variable):
            source = "a file that xarray opened lazily"
            return _UnreadVariable(variable), Cause(Reason.FILE, source=source)
        return x.data  # may be from any framework; sparse arrays raise later

    def rebuild(self, x: Any, array: Any) -> Any:
        like = x.copy(deep=False, data=array)
        # The encoding describes how a file stores the old values; arithmetic also drops it
        # (pydata/xarray#1586).
        getattr(like, "variable", like).encoding = {}  # the same property of a DataArray takes 1 µs
        return like


def _is_unread(variable: Any) -> bool:
    """Return whether an xarray variable has not read its values from a file yet.

    This uses private attributes: ``data`` would read the file, and xarray 2026.9 has no public alternative
    (Unidata/MetPy#1835).
    """
    contents = getattr(variable, "_data", None)
    is_of_xarray = package_of(type(contents)) == "xarray"
    return is_of_xarray and not getattr(variable, "_in_memory", True)


class _UnreadVariable:
    """The values of an xarray variable, which are read from its file in parts."""

    def __init__(self, variable: Any) -> None:
        self.shape = tuple(variable.shape)
        self.dtype = np.dtype(variable.dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self._variable = variable

    def __getitem__(self, key: Any) -> np.ndarray:
        values = np.asarray(self._variable[key].values)
        return values if values.flags.owndata else buffers.copy_aligned(values)

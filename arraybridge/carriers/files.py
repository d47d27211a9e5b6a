"""The carrier for arrays in files, and for compressed arrays: zarr, h5py and blosc2."""

from __future__ import annotations

from typing import Any

from arraybridge.carriers.carrier import Carrier, contents_error, is_of
from arraybridge.interface.installation import package_of
from arraybridge.reasons import Cause, Reason


class Files(Carrier):
    """A carrier for zarr arrays, h5py datasets and blosc2 arrays."""

    expression = "{x}[...]"

    def carries(self, x: Any) -> bool:
        return is_of(x, "zarr", "Array") or is_of(x, "h5py", "Dataset") or is_of(x, "blosc2", "NDArray")

    def array(self, x: Any) -> Any:
        package = package_of(type(x))
        if package == "h5py" and not x:
            raise contents_error("an h5py dataset", "its file is closed", "Open the file again.")
        if x.shape is None:
            raise contents_error(
                "an empty h5py dataset", "it has no shape", "Pass {}.", "np.empty(0, {x}.dtype)"
            )
        sources = {"zarr": "a zarr array", "h5py": "an h5py dataset"}
        return x, Cause(Reason.FILE, source=sources.get(package, "a compressed blosc2 array"))

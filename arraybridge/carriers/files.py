"""The carrier for arrays in files: zarr and h5py."""

from __future__ import annotations

from typing import Any

from arraybridge.carriers.carrier import Carrier, is_of, unsupported_contents_error
from arraybridge.reasons import Cause, Reason


class Files(Carrier):
    """A carrier for zarr arrays and h5py datasets."""

    expression = "{x}[...]"

    def carries(self, x: Any) -> bool:
        return is_of(x, "zarr", "Array") or is_of(x, "h5py", "Dataset")

    def array(self, x: Any) -> Any:
        package = type(x).__module__.partition(".")[0]
        if package == "h5py" and not x:
            raise unsupported_contents_error("an h5py dataset whose file is closed", "open the file again")
        if x.shape is None:
            raise unsupported_contents_error(
                "an empty h5py dataset", "it has no shape; pass {}", "np.empty(0, {x}.dtype)"
            )
        return x, Cause(Reason.FILE, source="a zarr array" if package == "zarr" else "an h5py dataset")

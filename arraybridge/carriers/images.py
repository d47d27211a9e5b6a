"""Carriers for images: SimpleITK and Pillow."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import Carrier, Unread, is_of, unsupported_contents_error
from arraybridge.errors import ArrayNotSupportedError
from arraybridge.reasons import Cause, Reason


class SimpleItk(Carrier):
    """A carrier for SimpleITK images, whose origin, spacing and direction are preserved."""

    expression = "SimpleITK.GetArrayFromImage({x})"

    def carries(self, x: Any) -> bool:
        return is_of(x, "SimpleITK", "Image")

    def array(self, x: Any) -> Any:
        sitk = sys.modules["SimpleITK"]
        if "label" in x.GetPixelIDTypeAsString():  # reading label maps crashes the process
            instead = "it has no pixels; pass {}"
            raise unsupported_contents_error(
                "a SimpleITK label map", instead, "SimpleITK.LabelMapToLabel({x})"
            )
        ones = sitk.Image([1] * x.GetDimension(), x.GetPixelID(), x.GetNumberOfComponentsPerPixel())
        pixel = sitk.GetArrayFromImage(ones)
        shape = x.GetSize()[::-1] + pixel.shape[x.GetDimension() :]

        def pixels() -> np.ndarray:
            # If two images share pixels, reading one of them drops its metadata.
            values: np.ndarray = sitk.GetArrayFromImage(sitk.Image(x))
            return values

        unread = Unread(shape, pixel.dtype, pixels)
        return unread, Cause(Reason.CARRIER_COPIES, source="SimpleITK")

    def rebuild(self, x: Any, array: Any) -> Any:
        sitk = sys.modules["SimpleITK"]
        vector = "vector" in x.GetPixelIDTypeAsString()
        values = array[..., None] if vector and array.ndim == x.GetDimension() else array
        try:
            like = sitk.GetImageFromArray(values, isVector=vector)
        except (KeyError, TypeError, RuntimeError):  # SimpleITK does not support this dtype
            return array
        like.CopyInformation(x)
        for key in x.GetMetaDataKeys():
            like.SetMetaData(key, x.GetMetaData(key))
        return like


class Pillow(Carrier):
    """A carrier for Pillow images, whose mode defines the meaning of their values."""

    expression = "np.asarray({x})"

    def carries(self, x: Any) -> bool:
        return is_of(x, "PIL.Image", "Image")

    def array(self, x: Any) -> Any:
        if x.mode in ("P", "PA"):
            instead = (
                "its values are color indices; pass {} for its colors, or {} for its indices (such as labels)"
            )
            raise unsupported_contents_error(
                f"a mode-{x.mode} image", instead, '{x}.convert("RGB")', "np.asarray({x})"
            )
        if _is_closed(x):
            raise _closed_image()
        pixel = np.asarray(sys.modules["PIL.Image"].new(x.mode, (1, 1)))

        def pixels() -> np.ndarray:
            try:
                values = np.array(x)  # True is stored as 255 in mode "1"
            except (ValueError, AttributeError) as error:  # the file was closed before the image was read
                raise _closed_image() from error
            return values.view(np.uint8) != 0 if values.dtype == bool else values

        unread = Unread((*x.size[::-1], *pixel.shape[2:]), pixel.dtype, pixels)
        return unread, Cause(Reason.CARRIER_COPIES, source="Pillow")

    def rebuild(self, x: Any, array: Any) -> Any:
        pillow = sys.modules["PIL.Image"]
        pixel = np.asarray(pillow.new(x.mode, (1, 1)))
        if array.dtype.newbyteorder("=") != pixel.dtype.newbyteorder("="):  # mode I;16B is big-endian
            try:
                like = pillow.fromarray(array)
            except (TypeError, ValueError):  # Pillow has no mode for this dtype
                return array
            if self.array(like)[0].dtype != array.dtype:  # Pillow converts float64 to float32
                return array
        elif x.mode == "1":
            like = pillow.fromarray(array)
        else:  # the shape does not define the mode: CMYK and RGBA both have four channels
            like = pillow.frombytes(x.mode, x.size, array.astype(pixel.dtype, copy=False).tobytes())
        like.info = x.info.copy()
        return like


def _is_closed(x: Any) -> bool:
    """Return whether a Pillow image is closed, whether or not its pixels have been read.

    This uses the private ``_im``, because ``x.im`` raises for a closed image (Pillow 13).
    """
    is_unread = bool(getattr(x, "tile", None))
    if is_unread and getattr(x, "fp", x) is None:
        return True
    return type(getattr(x, "_im", None)).__name__ == "DeferredError"


def _closed_image() -> ArrayNotSupportedError:
    instead = "open the file again, and convert the image before closing it"
    return unsupported_contents_error("a closed Pillow image", instead)

"""Carriers for images: SimpleITK and Pillow."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import Carrier, Unread, contents_error, is_of
from arraybridge.errors import ArrayNotSupportedError
from arraybridge.reasons import Cause, Reason

_COPIED_BY_SITK = Cause(Reason.CARRIER_COPIES, source="SimpleITK")
_COPIED_BY_PILLOW = Cause(Reason.CARRIER_COPIES, source="Pillow")


@cache
def _sitk_pixel(axes: int, kind: int, components: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and the dtype of the pixels of SimpleITK images."""
    sitk = sys.modules["SimpleITK"]
    ones = sitk.GetArrayFromImage(sitk.Image([1] * axes, kind, components))
    return ones.shape[axes:], ones.dtype


@cache
def _pillow_pixel(mode: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and the dtype of the pixels of Pillow images of a mode."""
    pixel = np.asarray(sys.modules["PIL.Image"].new(mode, (1, 1)))
    return pixel.shape[2:], pixel.dtype


class SimpleItk(Carrier):
    """A carrier for SimpleITK images, whose origin, spacing and direction are preserved."""

    expression = "SimpleITK.GetArrayFromImage({x})"

    def carries(self, x: Any) -> bool:
        return is_of(x, "SimpleITK", "Image")

    def array(self, x: Any) -> Any:
        sitk = sys.modules["SimpleITK"]
        # Reading label maps crashes the process (SimpleITK 2.5, no issue found).
        if "label" in x.GetPixelIDTypeAsString():
            raise contents_error(
                "a SimpleITK label map", "it has no pixels", "Pass {}.", "SimpleITK.LabelMapToLabel({x})"
            )
        shape, dtype = _sitk_pixel(x.GetDimension(), x.GetPixelID(), x.GetNumberOfComponentsPerPixel())

        def pixels() -> np.ndarray:
            # If two images share pixels, reading one of them drops its metadata (SimpleITK 2.5, no issue
            # found).
            values: np.ndarray = sitk.GetArrayFromImage(sitk.Image(x))
            return values

        return Unread(x.GetSize()[::-1] + shape, dtype, pixels), _COPIED_BY_SITK

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
        return isinstance(x, sys.modules["PIL.Image"].Image)  # faster than `is_of`

    def array(self, x: Any) -> Any:
        mode = x.mode
        if mode in ("P", "PA"):
            raise contents_error(
                f"a mode-{mode} image",
                "its values are color indices",
                "Pass {} for its colors, or {} for its indices (such as labels).",
                '{x}.convert("RGB")',
                "np.asarray({x})",
            )
        if _is_closed(x):
            raise _reopen_error()
        shape, dtype = _pillow_pixel(mode)

        def pixels() -> np.ndarray:
            try:
                values = np.array(x)  # True is stored as 255 in mode "1", python-pillow/Pillow#2683
            except (ValueError, AttributeError) as error:  # the file was closed before the image was read
                raise _reopen_error() from error
            return values.view(np.uint8) != 0 if values.dtype.kind == "b" else values

        return Unread((x.height, x.width, *shape), dtype, pixels), _COPIED_BY_PILLOW

    def rebuild(self, x: Any, array: Any) -> Any:
        pillow = sys.modules["PIL.Image"]
        dtype = _pillow_pixel(x.mode)[1]
        # Mode I;16B is big-endian (Pillow docs, "Concepts: Modes").
        if array.dtype.newbyteorder("=") != dtype.newbyteorder("="):
            try:
                like = pillow.fromarray(array)
            except (TypeError, ValueError):  # Pillow has no mode for this dtype
                return array
            if self.array(like)[0].dtype != array.dtype:  # Pillow converts float64 to float32
                return array
        elif x.mode == "1":
            like = pillow.fromarray(array)
        else:  # the shape does not define the mode: CMYK and RGBA both have four channels
            like = pillow.frombytes(x.mode, x.size, array.astype(dtype, copy=False).tobytes())
        like.info = x.info.copy()
        return like


def _is_closed(x: Any) -> bool:
    """Return whether a Pillow image is closed, whether or not its pixels have been read.

    This uses the private ``_im`` (python-pillow/Pillow#6982), because ``x.im`` raises for a closed image
    (Pillow 13).
    """
    is_unread = bool(getattr(x, "tile", None))
    if is_unread and getattr(x, "fp", x) is None:
        return True
    return type(getattr(x, "_im", None)).__name__ == "DeferredError"


def _reopen_error() -> ArrayNotSupportedError:
    advice = "Open the file again, and convert the image before closing it."
    return contents_error("a Pillow image", "it is closed", advice)

"""Images: SimpleITK, Pillow."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from arraybridge.carriers.carrier import Carrier, Unread, is_of, refused


class SimpleItk(Carrier):
    """Images with a place in space."""

    def carries(self, x: Any) -> bool:
        return is_of(x, "SimpleITK", "Image")

    def array(self, x: Any) -> Any:
        sitk = sys.modules["SimpleITK"]
        if "label" in x.GetPixelIDTypeAsString():  # SimpleITK ends the process where these are read
            raise refused("a label map of SimpleITK", "it has no pixels; pass sitk.LabelMapToLabel(x)")
        ones = sitk.Image([1] * x.GetDimension(), x.GetPixelID(), x.GetNumberOfComponentsPerPixel())
        pixel = sitk.GetArrayFromImage(ones)
        shape = x.GetSize()[::-1] + pixel.shape[x.GetDimension() :]

        def pixels() -> np.ndarray:
            # A look at pixels that two images share drops the metadata of one: so it is at a second image.
            values: np.ndarray = sitk.GetArrayFromImage(sitk.Image(x))
            return values

        unread = Unread(shape, pixel.dtype, pixels)
        return unread, "SimpleITK lends no memory that outlives its image"

    def rebuild(self, x: Any, array: Any) -> Any:
        sitk = sys.modules["SimpleITK"]
        vector = "vector" in x.GetPixelIDTypeAsString()
        values = array[..., None] if vector and array.ndim == x.GetDimension() else array
        try:
            like = sitk.GetImageFromArray(values, isVector=vector)
        except (KeyError, TypeError, RuntimeError):  # no pixels of this dtype
            return array
        like.CopyInformation(x)
        for key in x.GetMetaDataKeys():
            like.SetMetaData(key, x.GetMetaData(key))
        return like


class Pillow(Carrier):
    """Pictures, whose mode says what their numbers mean."""

    def carries(self, x: Any) -> bool:
        return is_of(x, "PIL.Image", "Image")

    def array(self, x: Any) -> Any:
        if x.mode in ("P", "PA"):
            instead = 'its numbers stand for colours; pass x.convert("RGB")'
            raise refused(f"a picture of mode {x.mode}", instead)
        pixel = np.asarray(sys.modules["PIL.Image"].new(x.mode, (1, 1)))

        def pixels() -> np.ndarray:
            values = np.array(x)  # whose True is 255 in mode "1"
            return values.view(np.uint8) != 0 if values.dtype == bool else values

        unread = Unread((*x.size[::-1], *pixel.shape[2:]), pixel.dtype, pixels)
        return unread, "Pillow hands out a copy of its pixels"

    def rebuild(self, x: Any, array: Any) -> Any:
        pillow = sys.modules["PIL.Image"]
        pixel = np.asarray(pillow.new(x.mode, (1, 1)))
        if array.dtype.newbyteorder("=") != pixel.dtype.newbyteorder("="):  # mode I;16B is big-endian
            try:
                like = pillow.fromarray(array)
            except (TypeError, ValueError):  # no mode of this dtype
                return array
        elif x.mode == "1":
            like = pillow.fromarray(array)
        else:  # by the mode of the picture: CMYK looks like RGBA
            like = pillow.frombytes(x.mode, x.size, array.astype(pixel.dtype, copy=False).tobytes())
        like.info = x.info.copy()
        return like

"""A framework that speaks DLPack, taught to arraybridge: PaddlePaddle once more, as far as its CPU goes."""

import paddle

import arraybridge

NAMES = "bool int8 int16 int32 int64 uint8 float16 bfloat16 float32 float64 complex64 complex128"


class PaddleOnTheCpu(arraybridge.Framework):
    name = "paddle"
    modules = ("paddle",)
    dtypes = frozenset(NAMES.split())

    def owns(self, x):
        return isinstance(x, paddle.Tensor)

    def dtype_name(self, x):
        return str(x.dtype).removeprefix("paddle.")

    def nbytes(self, x):
        return x.size * x.element_size()

    def cannot_stride(self, shape, strides, itemsize):
        return "Paddle has no negative strides" if any(step < 0 for step in strides) else ""

    def requires_grad(self, x):
        return not x.stop_gradient

    def detach(self, x):
        return x.detach()

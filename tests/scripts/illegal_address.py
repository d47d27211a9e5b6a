"""Read far outside an array on the card, and say whether that counts as OOM. CUDA is of no use afterwards."""

import cupy

import arraybridge

read = cupy.RawKernel('extern "C" __global__ void f(float* x) { x[0] = x[1ll << 40]; }', "f")
x = cupy.zeros(1, "float32")
try:
    read((1,), (1,), (x,))
    cupy.cuda.runtime.deviceSynchronize()
except cupy.cuda.runtime.CUDARuntimeError as error:
    print(arraybridge.is_oom_error(error), flush=True)

"""A fake TensorFlow that was built for CUDA 13, with only the functions that the doctor calls."""

from types import SimpleNamespace

__version__ = "2.21.0"
sysconfig = SimpleNamespace(
    get_build_info=lambda: {"is_cuda_build": True, "cuda_version": "13.1", "cudnn_version": "9"}
)


def zeros(count):
    return [0] * count

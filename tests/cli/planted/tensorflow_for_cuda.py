"""A TensorFlow that was built for CUDA 13: no more than what the doctor asks."""

from types import SimpleNamespace

__version__ = "2.21.0"
sysconfig = SimpleNamespace(
    get_build_info=lambda: {"is_cuda_build": True, "cuda_version": "13.1", "cudnn_version": "9"}
)


def zeros(count):
    return [0] * count

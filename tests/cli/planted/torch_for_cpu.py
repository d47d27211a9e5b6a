"""A torch that was built for the CPU: no more than what the doctor asks."""

from types import SimpleNamespace

__version__ = "2.13.0+cpu"
version = SimpleNamespace(cuda=None, hip=None)


def zeros(count):
    return [0] * count

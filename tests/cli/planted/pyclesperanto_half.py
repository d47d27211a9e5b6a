"""A pyclesperanto that found no OpenCL device, and so imported half: it has no get_device."""

__version__ = "0.25.1"

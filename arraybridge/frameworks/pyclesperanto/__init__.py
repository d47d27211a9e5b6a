"""pyclesperanto: images on OpenCL, CUDA or Metal devices."""

"""pyclesperanto: OpenCL images."""

"""Classify real errors of pyopencl where pyclesperanto was never imported."""

import sys

import pyopencl as cl

import arraybridge

context = cl.create_some_context(interactive=False)
for size, flags in ((1 << 45, cl.mem_flags.READ_WRITE), (8, cl.mem_flags.COPY_HOST_PTR)):
    try:
        cl.Buffer(context, flags, size)
    except cl.Error as error:
        print(arraybridge.is_oom_error(error))
assert "pyclesperanto" not in sys.modules

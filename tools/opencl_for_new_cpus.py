"""Patch the PoCL wheel to compile for CPUs that its compiler does not know, in test environments only.

The newest wheel, PoCL 3.0, contains LLVM 14. It calls newer CPUs (such as Zen 5) "generic", which its clang
does not accept for x86, so no kernel compiles. This script replaces the name with "haswell", which has the
same length and whose code runs on these CPUs. `arraybridge doctor` recommends another PoCL to users.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from arraybridge.frameworks.pyclesperanto import opencl

_UNKNOWN, _KNOWN = b"\0 generic\0", b"\0 haswell\0"


def compiles() -> bool:
    """Return whether PoCL compiles for this CPU."""
    import pyopencl as cl

    context = cl.Context(opencl.devices()[:1])
    try:
        cl.Program(context, "kernel void nothing() {}").build()
    except cl.RuntimeError as error:
        if "unknown target CPU" not in str(error):
            raise
        return False
    return True


def main() -> None:
    library = opencl.pocl_wheel()
    if library is None or compiles():
        return
    driver = Path(library)
    code = driver.read_bytes()
    if code.count(_UNKNOWN) != 1:
        raise SystemExit(f"{driver} does not contain the expected CPU name")
    changed = driver.with_suffix(".changed")  # a new file, because environments may share this one
    changed.write_bytes(code.replace(_UNKNOWN, _KNOWN))
    shutil.copymode(driver, changed)
    changed.replace(driver)
    print(f"{driver}: patched to compile for unknown CPUs as for Haswell")


if __name__ == "__main__":
    main()

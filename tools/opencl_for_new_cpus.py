"""Let the PoCL wheel compile for a CPU that its compiler does not know; for the environments of tests alone.

The newest wheel, PoCL 3.0, brings LLVM 14. A CPU that is newer (Zen 5, of 2024) it names "generic", which its
clang refuses for x86, so that no kernel runs. "haswell" is as long a name, and such CPUs run what that runs.
`arraybridge doctor` tells users which other PoCL to take.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from arraybridge.frameworks.pyclesperanto import opencl

_UNKNOWN, _KNOWN = b"\0 generic\0", b"\0 haswell\0"


def compiles() -> bool:
    """Whether PoCL compiles for this CPU."""
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
        raise SystemExit(f"{driver} names an unknown CPU in another way")
    changed = driver.with_suffix(".changed")  # what other environments may share stays as it is
    changed.write_bytes(code.replace(_UNKNOWN, _KNOWN))
    shutil.copymode(driver, changed)
    changed.replace(driver)
    print(f"{driver}: compiles for a CPU that it does not know as for Haswell")


if __name__ == "__main__":
    main()

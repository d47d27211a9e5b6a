"""Compiles the CUDA C++ of one NVRTC program for the host; the emulated card runs it with its own Python.

compile_kernel.py SOURCE LIBRARY LOG [options of NVRTC]
"""

import re
import subprocess
import sys
from pathlib import Path

#: build.py compiles the header in front of each kernel with the same, so that it need not be read anew.
FLAGS = (
    *("-std=gnu++17", "-O1", "-fno-strict-aliasing", "-fpermissive", "-w", "-fPIC", "-shared"),
    # _FORTIFY_SOURCE refuses the long jump out of a fiber that faulted.
    *("-U_FORTIFY_SOURCE", "-D__CUDACC_VER_MAJOR__=13", "-D__CUDACC_VER_MINOR__=0"),
)

KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")
SHARED = re.compile(r"extern\s+__shared__\s+([^;\[]*?)(\w+)\s*\[\s*\]\s*;")


def _shared(match: re.Match[str]) -> str:
    # Shared memory whose size the launch says: a pointer to what gpu_run allocates.
    kind = re.sub(r"__align__ *\([^)]*\)", "", match[1])
    return f"auto *{match[2]} = ({kind} *)gpu_shared;"


def for_the_host(source: str) -> str:
    """The program, and for each kernel a function that takes a copy of its arguments."""
    names = KERNEL.findall(source)
    barriers = int("__sync" in source)
    lines = [SHARED.sub(_shared, source), f'extern "C" int gpu_with_barriers = {barriers};']
    lines += [
        f'extern "C" void *gpu_bind_{name}(void **a) {{ return gpu_bind({name}, a); }}' for name in names
    ]
    return "\n".join(lines) + "\n"


def main(source: str, library: str, log: str, *options: str) -> int:
    """Compile; the return code is the compiler's, and what it says goes to the log."""
    program = Path(f"{source}.cpp")
    program.write_text(for_the_host(Path(source).read_text()))
    made = Path(f"{source}.so")
    command = [
        *("g++", *FLAGS, *(option for option in options if option.startswith(("-I", "-D")))),
        # In the folder of the card: there the header lies compiled, too.
        *("-include", str(Path(library).parent.parent / "device_code.h"), str(program), "-o", str(made)),
    ]
    with Path(log).open("w") as said:
        code = subprocess.run(command, stderr=said, check=False).returncode
    program.unlink()
    if code == 0:
        made.replace(library)  # whoever compiles the same at the same time finds it whole
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

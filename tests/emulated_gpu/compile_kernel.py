"""Compile the CUDA C++ of one NVRTC program for the host; the emulated GPU runs this with its own Python.

compile_kernel.py SOURCE LIBRARY LOG [options of NVRTC]
"""

import re
import subprocess
import sys
from pathlib import Path

#: build.py compiles the precompiled header with these options, as the compiler requires.
FLAGS = (
    *("-std=gnu++17", "-O1", "-fno-strict-aliasing", "-fpermissive", "-w", "-fPIC", "-shared"),
    # A GPU rejects misaligned addresses. Here, each access is checked, and executes an illegal instruction.
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
    # _FORTIFY_SOURCE rejects the long jump out of a fiber that faulted.
    *("-U_FORTIFY_SOURCE", "-D__CUDACC_VER_MAJOR__=13", "-D__CUDACC_VER_MINOR__=0"),
)

KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")
SHARED = re.compile(r"extern\s+__shared__\s+([^;\[]*?)(\w+)\s*\[\s*\]\s*;")


def _shared(match: re.Match[str]) -> str:
    # Shared memory whose size is set at launch is a pointer to memory allocated by gpu_run.
    kind = re.sub(r"__align__ *\([^)]*\)", "", match[1])
    return f"auto *{match[2]} = ({kind} *)gpu_shared;"


def for_the_host(source: str) -> str:
    """Return the program, with one function per kernel that takes a copy of its arguments."""
    names = KERNEL.findall(source)
    barriers = int("__sync" in source)
    lines = [SHARED.sub(_shared, source), f'extern "C" int gpu_with_barriers = {barriers};']
    lines += [
        f'extern "C" void *gpu_bind_{name}(void **a) {{ return gpu_bind({name}, a); }}' for name in names
    ]
    return "\n".join(lines) + "\n"


def main(source: str, library: str, log: str, *options: str) -> int:
    """Compile, write the compiler's output to the log, and return its exit status."""
    program = Path(f"{source}.cpp")
    program.write_text(for_the_host(Path(source).read_text()))
    made = Path(f"{source}.so")
    command = [
        *("g++", *FLAGS, *(option for option in options if option.startswith(("-I", "-D")))),
        # Compile in the folder of the emulated GPU, which contains the precompiled header.
        *("-include", str(Path(library).parent.parent / "device_code.h"), str(program), "-o", str(made)),
    ]
    with Path(log).open("w") as said:
        code = subprocess.run(command, stderr=said, check=False).returncode
    program.unlink()
    if code == 0:
        made.replace(library)  # atomic, for concurrent compilations of the same program
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

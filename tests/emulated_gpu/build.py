"""Build the emulated GPU: ``python tests/emulated_gpu/build.py FOLDER [--torch SITE_PACKAGES]``.

The build needs gcc and g++, and CUDA's headers, which include the list of runtime calls. The wheels
nvidia-cuda-runtime and nvidia-cuda-crt contain them (neither CUDA nor a driver is needed). With
``--torch``, the libraries that a CUDA build of PyTorch links to are also generated; each of their functions
returns an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from tests.emulated_gpu.compile_kernel import FLAGS  # noqa: E402

SOURCES = ("devices.c", "memory.c", "streams.c", "kernels.c", "driver.c", "loader.c")
#: Names under which programs load the library.
ALIASES = ("libcuda.so.1", "libnvrtc.so.13", "libnvidia-ml.so.1")
LIBRARY = "libcudart.so.13"


def run(*command: str | Path) -> str:
    """Return the command's output. If the command fails, end the build with its error output."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def cuda() -> Path:
    """Return the folder of the CUDA 13 wheels, with ``include`` and ``lib``."""
    found = importlib.util.find_spec("nvidia")
    for place in found.submodule_search_locations or () if found else ():
        folder = Path(place) / "cu13"
        if (folder / "include" / "cuda_runtime_api.h").exists() and (folder / "include" / "crt").exists():
            return folder
    sys.exit("CUDA's headers are missing: pip install nvidia-cuda-runtime nvidia-cuda-crt")


def exported(library: Path, *options: str) -> set[str]:
    """Return the names that a library defines, or with --undefined-only, imports."""
    lines = run("nm", "-D", *(options or ("--defined-only",)), library).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.strip()}


def defined(objects: list[Path]) -> set[str]:
    return {line.split()[-1] for line in run("nm", "--defined-only", *objects).splitlines() if " T " in line}


def driver_calls(header: Path) -> set[str]:
    text = header.read_text()
    named = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", text))
    version = r"(?m)^#define\s+(cu[A-Z]\w+)\s+(?:__CUDA_API_PT[DS]Z\()?(cu[A-Z]\w+)\)?\s*$"
    return named.union(*re.findall(version, text))


def stubs(names: set[str], answer: str) -> str:
    """Return the C code of functions that return a "not emulated" error."""
    lines = [f"int {answer}(const char *);"]
    lines += [f'int {name}(void) {{ return {answer}("{name}"); }}' for name in sorted(names)]
    return "\n".join(lines) + "\n"


def build(folder: Path) -> None:
    """Compile the emulated GPU into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for program in ("gcc", "g++", "nm"):
        if shutil.which(program) is None:
            sys.exit(f"the emulated GPU is built with gcc, g++ and binutils; {program} is missing")
    headers = cuda() / "include"
    objects = []
    flags = ("-std=gnu11", "-O1", "-g", "-fPIC", "-Wall", "-U_FORTIFY_SOURCE", f"-I{headers}")
    for source in SOURCES:
        objects.append(folder / f"{source}.o")
        run("gcc", *flags, "-c", HERE / "emulator" / source, "-o", objects[-1])
    runtime = {name for name in exported(cuda() / "lib" / LIBRARY) if name.startswith("cuda")}
    missing = (runtime | driver_calls(headers / "cuda.h")) - defined(objects)
    (folder / "stubs.c").write_text(stubs(missing, "gpu_unimplemented"))
    named = ("-Wl,-soname," + LIBRARY, "-o", folder / LIBRARY)
    run("gcc", "-w", "-fPIC", "-shared", *named, *objects, folder / "stubs.c", "-ldl", "-lpthread")
    for alias in ALIASES:
        (folder / alias).unlink(missing_ok=True)
        (folder / alias).symlink_to(LIBRARY)
    for cache in ("kernels", "cupy"):  # kernels of an older version of the emulation
        shutil.rmtree(folder / cache, ignore_errors=True)
    (folder / "kernels").mkdir()
    header = Path(shutil.copy(HERE / "emulator" / "device_code.h", folder))
    run("g++", *FLAGS, "-x", "c++-header", header, "-o", f"{header}.gch")


# Functions that PyTorch's libraries import from GPU libraries.
_FOREIGN = re.compile(
    r"cublas|cudnn|cufft|cusparse|cusolver|curand|nccl|nvrtc|cuFile|cupti|nvshmem|nvJit|_ZN5cudnn|_Z\w*(?:nvshmem|cudnn|nccl)"
)


def build_for_torch(folder: Path, site: Path) -> None:
    """Generate the libraries besides the runtime that PyTorch's libraries link to."""
    libraries = sorted((site / "torch" / "lib").glob("*.so"))
    if not libraries:
        sys.exit(f"{site} does not contain PyTorch")
    wanted = set().union(*(exported(one, "--undefined-only") for one in libraries))
    there = set().union(*(exported(one) for one in (*libraries, folder / LIBRARY)))
    names = {name for name in wanted - there if _FOREIGN.match(name)}
    code = stubs(names, "torch_unimplemented")
    answer = "static int said(const char *name) { return 1; }\n#define torch_unimplemented said\n"
    (folder / "torch_stubs.c").write_text(answer + code.split("\n", 1)[1])
    run("gcc", "-w", "-shared", "-fPIC", "-o", folder / "libtorchstubs.so", folder / "torch_stubs.c")
    links = run("readelf", "-d", *libraries)
    needed = set(re.findall(r"NEEDED.*\[(lib(?:cu(?!da)|nccl|nv|cudnn)[^\]]*)\]", links))
    for name in sorted(needed - {LIBRARY, *ALIASES}):
        (folder / "empty.c").write_text("")
        run(
            *("gcc", "-shared", "-fPIC", "-Wl,--no-as-needed", folder / "empty.c", "-o", folder / name),
            *(f"-L{folder}", "-l:libtorchstubs.so", f"-Wl,-soname,{name}"),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", type=Path, metavar="SITE_PACKAGES")
    chosen = parser.parse_args()
    build(chosen.folder.resolve())
    if chosen.torch:
        build_for_torch(chosen.folder.resolve(), chosen.torch.resolve())

"""Metadata of frameworks that are not imported yet, and the table of the built-in frameworks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUILT_IN", "FrameworkMetadata"]


@dataclass(slots=True, eq=False, repr=False)
class FrameworkMetadata:
    """Metadata of a framework that is available before its import. A plug-in may set `Runtime.facts`.

    Attributes:
        name: how users name it.
        packages: what ``import`` takes, the preferred one first; ``(name,)`` where empty.
        modules: root modules in which the types of its arrays are defined; ``packages`` where empty.
        distributions: what brings it, as package indexes call it, first the one to install; ``packages``
            where empty.
        runs_numpy_code: whether functions written for NumPy run on its arrays: True where ``@gpu``,
            `array_namespace` and `compare` may choose it, None where ``@gpu`` takes it by name alone, False
            where it never does. The first in the list is the nearest to NumPy.
        libraries: parts of paths by which one sees that a process has loaded it; None for the folders of its
            ``modules``.
        nicknames: what people call it in code; not accepted, but understood by suggestions.
        extra: the extra of arraybridge that installs it; ``name`` if empty.
        install_note: an addition to the command that installs it.
        has_only_host: as `Devices.has_only_host`, before the import.
        accelerator_kind: the `Device.kind` of its accelerators, of pyclesperanto on OpenCL.
        has_allocator: whether CuPy can use its memory pool; its class then has a method ``allocator``.
        loads_first: whether it has to be loaded before other frameworks, because afterwards it may crash.
    """

    name: str
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    runs_numpy_code: bool | None = None
    libraries: tuple[str, ...] | None = None
    nicknames: tuple[str, ...] = ()
    extra: str = ""
    install_note: str = ""
    has_only_host: bool = False
    accelerator_kind: str = "gpu"
    has_allocator: bool = False
    loads_first: bool = False

    def __post_init__(self) -> None:
        self.packages = self.packages or (self.name,)
        self.modules = self.modules or self.packages
        self.distributions = self.distributions or self.packages
        self.extra = self.extra or self.name
        if self.libraries is None:
            self.libraries = tuple(f"/{module}/" for module in self.modules)


_CUPYS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_CLESPERANTOS = ("pyclesperanto", "pyclesperanto_prototype")

BUILT_IN = {
    one.name: one
    for one in (
        FrameworkMetadata(
            "numpy", runs_numpy_code=False, libraries=(), nicknames=("np",), has_only_host=True
        ),
        FrameworkMetadata(
            "cupy",
            distributions=_CUPYS,
            runs_numpy_code=True,
            nicknames=("cp",),
            extra=_CUPYS[0],
            install_note=f"for CUDA 12: {_CUPYS[1]}",
        ),
        FrameworkMetadata("torch", runs_numpy_code=True, nicknames=("pytorch",), has_allocator=True),
        FrameworkMetadata("jax", modules=("jax", "jaxlib"), runs_numpy_code=True, nicknames=("jnp",)),
        FrameworkMetadata(
            "tensorflow",
            distributions=("tensorflow", "tensorflow-cpu"),
            runs_numpy_code=False,
            nicknames=("tf", "keras"),
        ),
        FrameworkMetadata(
            "pyclesperanto",
            packages=_CLESPERANTOS,
            modules=(*_CLESPERANTOS, "pyclesperanto_opencl", "pyclesperanto_cuda", "pyclesperanto_metal"),
            runs_numpy_code=False,
            libraries=("/pyclesperanto", "/pyopencl/"),
            nicknames=("cle", "opencl"),
            accelerator_kind="opencl",
            loads_first=True,  # a system's PoCL crashes the process when it is loaded after TensorFlow
        ),
        FrameworkMetadata("mlx"),
        FrameworkMetadata("paddle", distributions=("paddlepaddle", "paddlepaddle-gpu")),
    )
}

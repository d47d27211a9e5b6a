"""Metadata of frameworks that is available before their import, and the table of built-in frameworks."""

from __future__ import annotations

__all__ = ["BUILT_IN", "FrameworkMetadata"]


class FrameworkMetadata:  # a dataclass would take 2% of the time of `import arraybridge`
    """Metadata of a framework that is available before its import. A plug-in may set `Runtime.metadata`.

    Attributes:
        name: The name that users pass.
        packages: The import names, the preferred one first. Defaults to ``(name,)``.
        modules: The top-level modules that define the types of its arrays. Defaults to ``packages``.
        distributions: The names on the package index, the preferred one first. Defaults to ``packages``.
        runs_numpy_code: Whether functions written for NumPy run on its arrays. If True, `array_namespace`,
            `compare` and ``@gpu`` may choose the framework. If None, ``@gpu`` uses it only if the user names
            it. If False, ``@gpu`` never uses it. Of the frameworks with True, the first one in `BUILT_IN` is
            the most similar to NumPy.
        libraries: Substrings of the paths of its shared libraries, which identify processes that have loaded
            it. Defaults to the folders of its ``modules``.
        nicknames: Other common names. They are not accepted, but the error message then suggests ``name``.
        extra: The arraybridge extra that installs it. Defaults to ``name``.
        install_note: A note that follows the command that installs it.
        has_only_host: The value of `Devices.has_only_host`.
        accelerator_kind: The `Device.kind` of its accelerators.
        has_allocator: Whether CuPy can use its memory pool. If so, its `Framework` subclass defines a method
            ``allocator``.
        loads_first: Whether it must be loaded before other frameworks, to avoid a crash of the process.
    """

    def __init__(
        self,
        name: str,
        packages: tuple[str, ...] = (),
        modules: tuple[str, ...] = (),
        distributions: tuple[str, ...] = (),
        runs_numpy_code: bool | None = None,
        libraries: tuple[str, ...] | None = None,
        nicknames: tuple[str, ...] = (),
        extra: str = "",
        install_note: str = "",
        has_only_host: bool = False,
        accelerator_kind: str = "gpu",
        has_allocator: bool = False,
        loads_first: bool = False,
    ) -> None:
        self.name = name
        self.packages = packages or (name,)
        self.modules = modules or self.packages
        self.distributions = distributions or self.packages
        self.runs_numpy_code = runs_numpy_code
        if libraries is None:
            libraries = tuple(f"/{module}/" for module in self.modules)
        self.libraries = libraries
        self.nicknames = nicknames
        self.extra = extra or name
        self.install_note = install_note
        self.has_only_host = has_only_host
        self.accelerator_kind = accelerator_kind
        self.has_allocator = has_allocator
        self.loads_first = loads_first


_CUPYS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_CLESPERANTOS = ("pyclesperanto", "pyclesperanto_prototype")

BUILT_IN = {
    one.name: one
    for one in (
        FrameworkMetadata(
            "numpy",
            modules=("numpy", "scipy"),
            runs_numpy_code=False,
            libraries=(),
            nicknames=("np",),
            has_only_host=True,
        ),
        FrameworkMetadata(
            "cupy",
            modules=("cupy", "cupyx"),
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
            loads_first=True,  # a Linux distribution's PoCL crashes if loaded after TensorFlow
        ),
        FrameworkMetadata("mlx"),
        FrameworkMetadata("paddle", distributions=("paddlepaddle", "paddlepaddle-gpu")),
    )
}

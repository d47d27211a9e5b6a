"""Metadata of frameworks that is available before their import, and the table of built-in frameworks."""

from __future__ import annotations

import sys

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
        requirement: The requirement that installs it, as in ``"mlx[cpu]"``. Defaults to the first of
            ``distributions``.
        install_note: A note that follows the command that installs it.
        has_only_host: The value of `Devices.has_only_host`.
        accelerator_kind: The `Device.kind` of its accelerators.
        has_allocator: Whether CuPy can use its memory pool. If so, its `Framework` subclass defines a method
            ``allocator``.
        has_x64: Whether a setting named x64 determines whether it computes in 64 bits, as in JAX.
        rewrites_functions: Whether its compiler rewrites the Python functions that it traces, as AutoGraph
            does.
        loads_first: Whether it must be loaded before other frameworks, to avoid a crash of the process.
        is_differentiable: Whether it has automatic differentiation.
        factory: The class or function in ``frameworks/<name>/framework.py`` that creates the `Framework`.
            Defaults to the name with ``Framework``, as in ``JaxFramework``.
        native_calls: The functions that convert arrays, by package, separated by spaces. Traces record them.
        alias: The usual alias of its import, such as ``"np"``. Defaults to ``name``.
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
        requirement: str = "",
        install_note: str = "",
        has_only_host: bool = False,
        accelerator_kind: str = "gpu",
        has_allocator: bool = False,
        has_x64: bool = False,
        rewrites_functions: bool = False,
        loads_first: bool = False,
        is_differentiable: bool = False,
        factory: str = "",
        native_calls: dict[str, str] | None = None,
        alias: str = "",
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
        self.requirement = requirement or self.distributions[0]
        self.install_note = install_note
        self.has_only_host = has_only_host
        self.accelerator_kind = accelerator_kind
        self.has_allocator = has_allocator
        self.has_x64 = has_x64
        self.rewrites_functions = rewrites_functions
        self.loads_first = loads_first
        self.is_differentiable = is_differentiable
        self.factory = factory or f"{name.capitalize()}Framework"
        self.native_calls = {} if native_calls is None else native_calls
        self.alias = alias or name


_CUPYS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_CLESPERANTOS = ("pyclesperanto", "pyclesperanto_prototype")

#: The built-in frameworks. No other module lists them, except where type checkers need their names.
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
            # NumPy reads JAX and TensorFlow arrays as buffers, without calling any of their methods.
            native_calls={"numpy": "asarray array asanyarray ascontiguousarray from_dlpack"},
            alias="np",
        ),
        FrameworkMetadata(
            "cupy",
            modules=("cupy", "cupyx"),
            distributions=_CUPYS,
            runs_numpy_code=True,
            nicknames=("cp",),
            extra=_CUPYS[0],
            install_note=f"for CUDA 12: {_CUPYS[1]}",
            native_calls={
                "cupy": "asarray array asanyarray ascontiguousarray asnumpy from_dlpack ndarray.get"
            },
        ),
        FrameworkMetadata(
            "torch",
            runs_numpy_code=True,
            nicknames=("pytorch",),
            has_allocator=True,
            is_differentiable=True,
            native_calls={
                "torch": "from_numpy as_tensor asarray tensor from_dlpack utils.dlpack.from_dlpack"
                " Tensor.numpy Tensor.cpu Tensor.cuda Tensor.to Tensor.__array__"
                " jit.script compile export.export"
            },
        ),
        FrameworkMetadata(
            "jax",
            modules=("jax", "jaxlib"),
            runs_numpy_code=True,
            nicknames=("jnp",),
            has_x64=True,
            is_differentiable=True,
            native_calls={
                "jax": "numpy.asarray numpy.array numpy.from_dlpack dlpack.from_dlpack device_put"
                " Array.__array__"
            },
        ),
        FrameworkMetadata(
            "tensorflow",
            distributions=("tensorflow", "tensorflow-cpu"),
            runs_numpy_code=False,
            nicknames=("tf", "keras"),
            rewrites_functions=True,
            is_differentiable=True,
            native_calls={
                "tensorflow": "constant convert_to_tensor experimental.dlpack.from_dlpack"
                " Tensor.numpy Variable.numpy"
            },
            alias="tf",
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
            factory="make_framework",
            native_calls={
                "pyclesperanto": "push pull asarray from_dlpack Array.get",
                "pyclesperanto_prototype": "push pull asarray",
            },
            alias="cle",
        ),
        # On Linux, the package mlx comes without a backend, which its extra "cpu" adds (mlx 0.32).
        FrameworkMetadata(
            "mlx", requirement="mlx[cpu]" if sys.platform == "linux" else "mlx", is_differentiable=True
        ),
        FrameworkMetadata(
            "paddle", distributions=("paddlepaddle", "paddlepaddle-gpu"), is_differentiable=True
        ),
    )
}

#!/usr/bin/env python3
"""Check which way the imports of arraybridge run.

    python tools/check_imports.py [PACKAGE_DIRECTORY]

Three rules, wherever in a file the import stands:

- A module imports from its own layer or a lower one, never from a higher one (see LAYERS).
- A framework is imported in its own room, frameworks/<framework>/,
  and nowhere else (ROOMS).
- No module imports itself by way of others.

Imports under ``if TYPE_CHECKING:`` never run and are free. Every breach is printed as ``file:line: message``;
the exit code is 0 without a breach, 1 with one, and 2 when the package can't be read.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "arraybridge"

# From the bottom to the top: the subpackages and top-level modules of the package.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "types", "options", "show", "pages", "machine"}),
    frozenset({"frameworks"}),
    frozenset({"placement", "trees", "batches"}),
    frozenset({"timeline"}),
    frozenset({"conversion"}),
    frozenset({"memory"}),
    frozenset({"functions", "devices"}),
    frozenset({"offload", "lines"}),
    frozenset({"__init__"}),  # the public names, which programs on top may use as any user does
    frozenset({"cli", "dask", "testing"}),
    frozenset({"__main__"}),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

# What may import anything at all. (The rank of __init__ says only who may import it.)
FREE = frozenset({"__init__"})

# The packages of each framework, and the folder under frameworks/ in which they may be imported.
ROOMS = {
    "cupy": "cupy",
    "cupyx": "cupy",
    "cupy_backends": "cupy",
    "jax": "jax",
    "jaxlib": "jax",
    "keras": "tensorflow",
    "mlx": "mlx",
    "paddle": "paddle",
    "pyclesperanto": "pyclesperanto",
    "pyclesperanto_cuda": "pyclesperanto",
    "pyclesperanto_metal": "pyclesperanto",
    "pyclesperanto_opencl": "pyclesperanto",
    "pyclesperanto_prototype": "pyclesperanto",
    "pyopencl": "pyclesperanto",
    "tensorflow": "tensorflow",
    "torch": "torch",
}
# Not a framework but the dtypes that several of them share: any room may import it.
SHARED_BY_ROOMS = frozenset({"ml_dtypes"})


def is_type_checking(test: ast.expr) -> bool:
    """Say whether this is the condition of ``if TYPE_CHECKING:`` or ``if typing.TYPE_CHECKING:``."""
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node but those under ``if TYPE_CHECKING:``."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and is_type_checking(node.test):
            waiting.extend(node.orelse)
        else:
            waiting.extend(ast.iter_child_nodes(node))


def imported_modules(node: ast.AST, package: list[str], parts: frozenset[str]) -> list[str]:
    """Return the full names of the modules that a node imports.

    ``package`` is the dotted path of the package that the file belongs to, where relative imports start.
    ``parts`` are the subpackages and modules at the top: by them ``from arraybridge import conversion`` is
    known to import a subpackage and not a public name.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        start = package[: len(package) - (node.level - 1)] if node.level else []
        base = ".".join([*start, *([node.module] if node.module else [])])
        if base == PACKAGE:
            return [f"{base}.{alias.name}" if alias.name in parts else base for alias in node.names]
        return [base]
    if isinstance(node, ast.Call) and node.args:
        # importlib.import_module("torch") and __import__("torch") with a name that can be read here.
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0]
        if name in {"import_module", "__import__"} and isinstance(first, ast.Constant):
            return [first.value] if isinstance(first.value, str) else []
    return []


def breach(module: str, here: str, room: str | None) -> str | None:
    """Say what is wrong with importing ``module``, or return None.

    ``here`` is the part of the package that the file stands in; ``room`` is the name of its file or folder
    in frameworks/, else None.
    """
    top, _, rest = module.partition(".")
    if top == PACKAGE:
        there = rest.partition(".")[0] or "__init__"
        if there not in RANK:
            return f"imports {module}, which has no layer; give it one in tools/check_imports.py"
        if here not in FREE and RANK[there] > RANK[here]:
            return f"{here} imports {module}, but imports run from {there} to {here}"
        return None
    if top in SHARED_BY_ROOMS and here != "frameworks":
        return f"imports {module}, which only {PACKAGE}/frameworks/ may"
    if top in ROOMS and (room is None or room != ROOMS[top]):
        return f"imports {module}, which only {PACKAGE}/frameworks/{ROOMS[top]}/ may"
    return None


def own_modules(node: ast.AST, package: list[str], there: frozenset[str]) -> list[str]:
    """Return the modules of the package, all of which ``there`` names, that a node imports."""
    names = imported_modules(node, package, frozenset())
    if isinstance(node, ast.ImportFrom):
        names = [full if (full := f"{names[0]}.{a.name}") in there else names[0] for a in node.names]
    return [name for name in names if name in there]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle of imports, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found[::-1]
    return []


def check(root: Path) -> tuple[int, list[str]]:
    """Read every module of the package in ``root``; return how many there are, and the breaches."""
    files = sorted(root.rglob("*.py"))
    parts = frozenset(path.stem for path in root.glob("*.py")) | frozenset(
        path.name for path in root.iterdir() if path.is_dir()
    )
    breaches: list[str] = []
    names = {path: ".".join([PACKAGE, *path.relative_to(root).with_suffix("").parts]) for path in files}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    there = frozenset(names.values())
    graph: dict[str, set[str]] = {}
    for path in files:
        inside = path.relative_to(root)
        here = inside.parts[0].removesuffix(".py")
        if here not in RANK:
            breaches.append(f"{path}:1: {here} has no layer; give it one in tools/check_imports.py")
            continue
        room = inside.parts[1].removesuffix(".py") if inside.parts[0] == "frameworks" else None
        package = [PACKAGE, *inside.parts[:-1]]
        for node in running_nodes(ast.parse(path.read_bytes(), filename=str(path))):
            graph.setdefault(names[path], set()).update(own_modules(node, package, there))
            for module in imported_modules(node, package, parts):
                message = breach(module, here, room)
                if message is not None:
                    breaches.append(f"{path}:{getattr(node, 'lineno', 1)}: {message}")
    around = circle({name: others - {name} for name, others in graph.items()})
    if around:
        breaches.append(f"{root}:1: a circle of imports: {' → '.join(around)}")
    return len(files), breaches


def main(arguments: list[str]) -> int:
    """Run the check as a command; return the exit code."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent / PACKAGE
    if len(arguments) > 1 or not (root / "__init__.py").is_file():
        print(f"{root} is no package.\nusage: check_imports.py [PACKAGE_DIRECTORY]", file=sys.stderr)
        return 2
    try:
        count, breaches = check(root)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        print(f"{root}: {error}", file=sys.stderr)
        return 2
    for line in breaches:
        print(line)
    if breaches:
        print(f"{len(breaches)} imports go where they may not, in {count} files.")
        return 1
    print(f"The imports of {count} files run one way.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

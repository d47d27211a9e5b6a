"""What a program will do wrong, found by reading it: variables that it sets too late, and fork after CUDA."""

from __future__ import annotations

import ast
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

from arraybridge.cli.facts import Problem
from arraybridge.frameworks import registry

__all__ = ["read_script"]


def read_script(path: Path) -> list[Problem]:
    """The faults of a Python program, which is read and not run.

    Raises:
        OSError: the file can't be read.
        SyntaxError: it is no Python.
        ValueError: it holds bytes that are no text.
    """
    tree = ast.parse(path.read_bytes(), filename=str(path))
    nodes = sorted((node for node in ast.walk(tree) if isinstance(node, (ast.stmt, ast.expr))), key=_place)
    imported: dict[str, int] = {}
    users = _users()
    for node in nodes:
        for name in _imports(node):
            if name in users:
                imported.setdefault(name, node.lineno)
    return [*_too_late(path, nodes, imported), *_forks(path, nodes, imported)]


def _users() -> dict[str, tuple[str, ...]]:
    """The frameworks, and beginnings of the names of variables that each reads at import or soon after."""
    return {name: registry.facts(name).variables for name in registry.framework_names() if name != "numpy"}


def _place(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]


def _too_late(path: Path, nodes: list[ast.stmt | ast.expr], imported: dict[str, int]) -> Iterator[Problem]:
    for node in nodes:
        for variable in _variables_set(node):
            readers = [name for name, starts in _users().items() if variable.startswith(starts)]
            line = node.lineno
            late = [name for name in readers if name in imported and imported[name] < line]
            if late:
                first = min(imported[name] for name in late)
                yield Problem(
                    "set-too-late",
                    "warning",
                    late[0],
                    f"{path.name} sets {variable} on line {line}, after the import of {' and '.join(late)}"
                    f" (line {first}), which may have read it by then.",
                    (f"# {path}: move line {line} above line {first}",),
                )


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _variables_set(node: ast.AST) -> Iterator[str]:
    """Names of the environment variables that a statement or a call sets."""
    keys: list[ast.expr | None] = []
    if isinstance(node, ast.Assign):
        keys = [t.slice for t in node.targets if isinstance(t, ast.Subscript) and _is_environ(t.value)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name, on = node.func.attr, node.func.value
        if (name == "setdefault" and _is_environ(on)) or name == "putenv":
            keys = list(node.args[:1])
        elif name == "update" and _is_environ(on):
            keys = [key for one in node.args if isinstance(one, ast.Dict) for key in one.keys]
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
    for key in keys:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def _forks(path: Path, nodes: list[ast.stmt | ast.expr], imported: dict[str, int]) -> Iterator[Problem]:
    users = [name for name in imported if name != "pyclesperanto"]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    chosen = [_start_method(call) for call in calls]
    default = multiprocessing.get_context().get_start_method()
    for call, method in zip(calls, chosen, strict=True):
        called = _called(call)
        forks = (
            method == "fork"
            or (called == "fork" and isinstance(call.func, ast.Attribute))
            or (
                called in ("Process", "Pool", "ProcessPoolExecutor") and default == "fork" and not any(chosen)
            )
        )
        if forks and users:
            yield Problem(
                "fork-after-cuda",
                "warning",
                users[0],
                f"{path.name} forks on line {call.lineno} and imports {' and '.join(users)}: once CUDA was"
                " used, a forked process can't use the card, and may hang.",
                (f'# {path}: call multiprocessing.set_start_method("spawn") before line {call.lineno}',),
            )


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _start_method(call: ast.Call) -> str | None:
    """The word in ``set_start_method("fork")`` and ``get_context("fork")``."""
    if _called(call) in ("set_start_method", "get_context") and call.args:
        first = call.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return first.value
    return None

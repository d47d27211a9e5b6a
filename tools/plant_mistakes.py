"""Measure how many small mistakes the tests see.

python tools/plant_mistakes.py --count 60 --seed 1          plants 60 mistakes, one after another
python tools/plant_mistakes.py --list                       prints them, and runs nothing
python tools/plant_mistakes.py --only 7 12                  runs two of them again

Each mistake changes one expression or statement of the package in a copy of the checkout: a comparison, a
condition, a number, a boolean operator, or a call that is dropped. The tests that belong to the module then
run until one fails: first the test files and folders that name the module, then the folder that mirrors its
package, then the tests of the whole library. A mistake that no test sees is either a missing test or code
that nothing needs.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "arraybridge"
#: Tests of the whole library, which run after the tests of the module.
GENERAL = ("tests/test_matrix.py", "tests/conversion", "tests/test_crashes.py")
#: Parts whose mistakes change only how things look.
SKIPPED_FUNCTIONS = ("__repr__", "__str__", "_repr_html_")
#: Frameworks whose tests run on request.
SKIPPED_FOLDERS = ("mlx", "paddle")
_SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mistake:
    """A change of the source text of one module.

    Attributes:
        path: The module, relative to the root of the checkout.
        line: The first line that changes.
        begin: The offset of the changed text in bytes.
        end: The offset after it.
        old: The text.
        new: The text that replaces it.
    """

    path: str
    line: int
    begin: int
    end: int
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Write the changed module to a copy of the checkout."""
        path = root / self.path
        text = path.read_bytes()
        path.write_bytes(text[: self.begin] + self.new.encode() + text[self.end :])

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old}  →  {self.new}"


def candidates(path: Path) -> Iterator[Mistake]:
    """Yield the mistakes that can be planted in a module."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    hidden = {id(inner) for node in ast.walk(tree) if _is_hidden(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        new = None if id(node) in hidden else _wrong_version(node)
        if new is None or not isinstance(node, (ast.expr, ast.stmt)):
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old = text.encode()[begin:end].decode()
        yield Mistake(str(path.relative_to(ROOT)), node.lineno, begin, end, " ".join(old.split()), new)


def _is_hidden(node: ast.AST) -> bool:
    """Return whether mistakes in a node could change only texts, types or names."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return node.name in SKIPPED_FUNCTIONS or node.name.endswith("_error")
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, (ast.Raise, ast.AnnAssign, ast.JoinedStr, ast.arg, ast.Import, ast.ImportFrom))


def _wrong_version(node: ast.AST) -> str | None:
    """Return the text of a wrong version of a node; None if there is none."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SWAPS:
        swapped = ast.Compare(node.left, [_SWAPS[type(node.ops[0])]()], node.comparators)
        return f"({ast.unparse(swapped)})"
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return f"({ast.unparse(ast.BoolOp(other, node.values))})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"bool({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return str(node.value + 1)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        return str(not node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        other_op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return f"({ast.unparse(ast.BinOp(node.left, other_op, node.right))})"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    return None


def choose(count: int, seed: int) -> list[Mistake]:
    """Return mistakes, drawn from all modules with a weight of their number of candidates."""
    paths = [
        path for path in sorted((ROOT / PACKAGE).rglob("*.py")) if path.parent.name not in SKIPPED_FOLDERS
    ]
    every = [one for path in paths for one in candidates(path)]
    return random.Random(seed).sample(every, count)  # noqa: S311  # not a secret


def tests_of(path: str) -> list[str]:
    """Return the test files and folders for a module, those that belong to it first."""
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    name = module.rpartition(".")[2]
    folder = Path("tests", *Path(path).parent.parts[1:])
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    parent = f"from {module.rpartition('.')[0]} import"
    named = [
        file
        for file, text in texts.items()
        if file.stem == f"test_{name}" or f"{module} import" in text or _imports(text, parent, name)
    ]
    named += [folder for folder in sorted((ROOT / "tests").rglob(name)) if folder.is_dir()]
    relative = [str(file.relative_to(ROOT)) for file in named]
    while str(folder) != "tests" and not (ROOT / folder).is_dir():
        folder = folder.parent
    mirrored = [] if str(folder) == "tests" else [str(folder)]
    return [*dict.fromkeys((*relative, *mirrored, *GENERAL))]


def _imports(text: str, parent: str, name: str) -> bool:
    """Return whether a test imports a module by its name from the package above it."""
    return any(
        line.startswith(parent) and name in line.replace(",", " ").split() for line in text.splitlines()
    )


def is_seen(mistake: Mistake, limit: float) -> tuple[str, str, float]:
    """Run the tests with a mistake. Return the verdict, the first failure, and the seconds.

    The verdict is "seen", "UNSEEN", or "no end" if the tests did not end within ``limit`` seconds. A test
    that hangs fails after two minutes.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in (PACKAGE, "tests", "tools", "docs", "examples", "benchmarks"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
        for file in (*ROOT.glob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.ini")):
            shutil.copy(file, root)
        mistake.apply(root)
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "120"),
            *tests_of(mistake.path),
        ]
        try:
            done = subprocess.run(
                command,
                cwd=root,
                env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "no end", "", time.monotonic() - start
    seconds = time.monotonic() - start
    if done.returncode == 0:
        return "UNSEEN", "", seconds
    lines = done.stdout.splitlines()
    failure = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "".join(lines[-1:]))
    return "seen", failure, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600, help="seconds per mistake")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the mistakes to run")
    parser.add_argument("--list", action="store_true", help="print the mistakes and run nothing")
    parser.add_argument("--json", type=Path, help="file of the results")
    arguments = parser.parse_args()
    chosen = list(enumerate(choose(arguments.count, arguments.seed)))
    if arguments.only:
        chosen = [chosen[number] for number in arguments.only]
    results = []
    for number, mistake in chosen:
        if arguments.list:
            print(number, mistake)
            continue
        verdict, failure, seconds = is_seen(mistake, arguments.limit)
        results.append({**asdict(mistake), "verdict": verdict, "failure": failure, "seconds": round(seconds)})
        print(number, f"{verdict:6}", f"{seconds:4.0f} s", mistake, failure, sep="  ", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if results:
        counts = Counter(str(one["verdict"]) for one in results)
        print(", ".join(f"{verdict}: {count}" for verdict, count in counts.items()))


if __name__ == "__main__":
    main()

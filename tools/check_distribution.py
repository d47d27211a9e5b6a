"""Check the built distribution: install the wheel in an empty environment and run the README's first example.

python tools/check_distribution.py                    uses dist/*.whl
python tools/check_distribution.py torch==2.13.0      installs this requirement first
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def first_example() -> tuple[str, str]:
    """Return the first Python program of the README, and what it prints."""
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"^```python\n(.*?)^```\n+```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if match is None:
        raise SystemExit("the README has no program that is followed by its output")
    return match[1], match[2]


def main() -> None:
    wheels = sorted((CHECKOUT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"expected one wheel in dist, found {len(wheels)}")
    program, expected = first_example()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        scripts = "Scripts" if sys.platform == "win32" else "bin"
        python = str(Path(folder, scripts, "python"))
        pip = [python, "-m", "pip", "install", "--quiet"]
        if sys.argv[1:]:
            subprocess.run([*pip, *sys.argv[1:]], check=True)
        subprocess.run([*pip, f"{wheels[0]}[torch,jax]"], check=True)
        subprocess.run([python, "-m", "pip", "check"], check=True)
        done = subprocess.run(
            [python, "-c", program], cwd=folder, capture_output=True, text=True, check=False
        )
    if done.returncode or done.stdout != expected:
        raise SystemExit(f"the example printed:\n{done.stdout}{done.stderr}\ninstead of:\n{expected}")
    print(f"{wheels[0].name}: the example prints what the README shows")


if __name__ == "__main__":
    main()

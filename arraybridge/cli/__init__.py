"""The command line: one file per command."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command ``arraybridge``."""
    from arraybridge.cli.app import app  # typer and rich cost 100 ms, which `import arraybridge` shall not

    app()

"""The command line: one file per command."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command ``arraybridge``."""
    try:
        # typer and rich cost 100 ms, which `import arraybridge` shall not.
        from arraybridge.cli.app import run

        run()
    except KeyboardInterrupt:  # while the program itself is imported; the rest is typer's
        raise SystemExit(130) from None

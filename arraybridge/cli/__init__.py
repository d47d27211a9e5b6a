"""The command-line interface: `app` assembles the program, and each command has its own module."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the program, or exit with install instructions if typer or rich is missing."""
    try:
        # typer and rich come with the extra `cli`.
        from arraybridge.cli.app import run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich", "packaging"):
            raise
        raise SystemExit(
            f"arraybridge: the command line requires {package}, which is not installed. Run pip install typer"
            ' rich packaging, or pip install ".[cli]" in a checkout of arraybridge.'
        ) from None
    run()

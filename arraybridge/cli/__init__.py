"""The command line: the program in `app`, and one file per command."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command; say what to install where its packages are missing."""
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
            f"arraybridge: the command line needs {package}; run pip install typer rich packaging, or"
            ' pip install ".[cli]" in a checkout of arraybridge'
        ) from None
    run()

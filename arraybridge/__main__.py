"""``python -m arraybridge`` is the command ``arraybridge``."""

from __future__ import annotations


def main() -> None:
    """Run the command; say what to install where its packages are missing."""
    try:
        # typer and rich cost 100 ms, and come with the extra `cli`.
        from arraybridge.cli import main as run
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


if __name__ == "__main__":
    main()

"""The entry point of ``python -m arraybridge``, which runs the ``arraybridge`` command."""

from arraybridge.cli import main

if __name__ == "__main__":
    main()

"""``python -m arraybridge`` is the command ``arraybridge``."""

from arraybridge.cli import main

if __name__ == "__main__":
    main()

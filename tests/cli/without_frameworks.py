"""The program where NumPy is the only framework that is installed, whatever is installed here."""

from arraybridge.cli import main
from tests.conversion.scripts.blocker import hide

hide()
main()

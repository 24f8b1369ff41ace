"""`python -m fata`."""

from fata.cli import run

run()

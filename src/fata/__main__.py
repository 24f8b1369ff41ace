"""`python -m fata`."""

from fata.cli import app

app(prog_name="fata")

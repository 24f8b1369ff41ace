"""A comparison on the terminal."""

from __future__ import annotations

from rich.table import Table

from fata.bench.formats import text
from fata.bench.tables import AVERAGE, SHORT, Comparison
from fata.commands import console, say


def show(comparison: Comparison) -> None:
    """The best of a column is green, a gain of FATA green or red, a collapse marked."""
    columns = (*comparison.columns, AVERAGE)
    table = Table()
    table.add_column("method")
    for column in (*(SHORT.get(one, one) for one in columns), "gain"):
        table.add_column(column, justify="right")
    for line in comparison.lines:
        cells = [
            f"[bold green]{text(line.at(column))}[/]"
            if comparison.rank(column, line) == 1
            else text(line.at(column))
            for column in columns
        ]
        gain = "" if line.gain is None else f"{line.gain:+.2f}"
        colour = {"+": "green", "-": "red"}.get(gain[:1], "white")
        table.add_row(line.method, *cells, f"[{colour}]{gain}[/]", end_section="+" in line.method)
    say(f"{comparison.title}: accuracy in %; † one class took over")
    console.print(table)
    for note in comparison.notes:
        say(note)

"""Tables of Markdown."""

from __future__ import annotations


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])

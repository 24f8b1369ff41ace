"""The commands of `fata`, one file each."""

from rich.console import Console

console = Console()


def say(text: str) -> None:
    """Print a line as it is: nothing coloured, nothing broken."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)

"""Names in what people read."""

import difflib
from collections.abc import Iterable


def listed(names: Iterable[str], most: int = 12) -> str:
    """Names for an error message, quoted, the middle left out where there are many."""
    quoted = [repr(name) for name in names]
    if len(quoted) > most:
        quoted = [*quoted[: most // 2], "...", *quoted[-most // 2 :]]
    return ", ".join(quoted)


def near(name: str, names: Iterable[str]) -> str:
    """' Did you mean ...?' for an error message, or nothing where no known name is like it."""
    close = difflib.get_close_matches(name, list(names), 3, 0.5)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def printable(text: str) -> str:
    """On one line: a blank in place of each control character."""
    return "".join(sign if sign.isprintable() else " " for sign in text)

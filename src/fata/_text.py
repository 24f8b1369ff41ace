"""Names in what people read."""


def printable(text: str) -> str:
    """On one line: a blank in place of each control character."""
    return "".join(sign if sign.isprintable() else " " for sign in text)

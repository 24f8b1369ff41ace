"""Errors of data sets."""


class DataError(ValueError):
    """Names the file or folder that is wrong, and what was expected there."""


class Damaged(Exception):  # noqa: N818
    """An image that was found damaged before; the text is that of the first error."""

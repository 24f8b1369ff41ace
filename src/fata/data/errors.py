"""What is wrong with a data set."""


class DataError(ValueError):
    """Names the file or folder that is wrong, and what was expected there."""

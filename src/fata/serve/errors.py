"""Errors that a client is told of."""

from __future__ import annotations


class ServiceError(Exception):
    """An error with its HTTP status; the message is for the client and tells nothing of the inside.

    Args:
        status: of HTTP.
        message: what was given, what is accepted.
        retry_after: seconds after which another try may succeed, or None.
    """

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after

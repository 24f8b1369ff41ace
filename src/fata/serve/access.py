"""Who may use the service: bearer tokens, each for all streams or for some."""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from fata.serve.errors import ServiceError

SHORTEST = 16  # characters of a token


@dataclass(frozen=True)
class Token:
    """A secret, and the streams that it is for.

    Args:
        secret: what follows `Bearer` in a request.
        streams: names, with `*` for any characters; none: all streams, and what is not a stream's.
    """

    secret: str
    streams: tuple[str, ...] = ()

    def allows(self, stream: str | None) -> bool:
        """Whether it is for a stream; None: for what concerns them all."""
        if not self.streams:
            return True
        return stream is not None and any(fnmatchcase(stream, one) for one in self.streams)


def read_tokens(path: str | os.PathLike[str]) -> list[Token]:
    """The tokens of a file: one a line, followed by the names of its streams if it is limited.

    Empty lines and lines that begin with `#` are left out.
    """
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    tokens = [Token(line[0], tuple(line[1:])) for line in lines if line and line[0][0] != "#"]
    if not tokens:
        raise ValueError(f"{os.fspath(path)!r} has no token: write one a line.")
    if any(len(token.secret) < SHORTEST for token in tokens):
        raise ValueError(
            f"{os.fspath(path)!r} has a token of fewer than {SHORTEST} characters: make one with "
            f"python -c 'import secrets; print(secrets.token_urlsafe())'."
        )
    return tokens


class Access:
    """Checks requests.

    Args:
        tokens: those that are accepted; none: anybody who can reach the port is let in.
    """

    def __init__(self, tokens: Sequence[Token] = ()) -> None:
        self._tokens = list(tokens)

    @property
    def needs_token(self) -> bool:
        """Whether a request needs one."""
        return bool(self._tokens)

    def token(self, authorization: str | None) -> Token:
        """The token of a request, by its header; raises `ServiceError` without a valid one."""
        if not self._tokens:
            return Token("")
        kind, _, secret = (authorization or "").partition(" ")
        given = secret.strip().encode() if kind.lower() == "bearer" else b""
        # All are compared, in constant time: how long it takes tells nothing.
        found = [t for t in self._tokens if hmac.compare_digest(t.secret.encode(), given)]
        if not found:
            raise ServiceError(401, "a valid bearer token is needed.")
        return found[0]

    def check(self, authorization: str | None, stream: str | None = None) -> Token:
        """Raise `ServiceError` unless the token of a request is for this stream."""
        token = self.token(authorization)
        if not token.allows(stream):
            what = "what concerns all streams" if stream is None else f"the stream {stream!r}"
            raise ServiceError(403, f"this token is not valid for {what}.")
        return token

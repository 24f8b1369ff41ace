"""Results in one SQLite file: a row a cell, by the hash of its protocol."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1
WAIT = 60  # seconds, for others that write
_SCHEMA = """
CREATE TABLE IF NOT EXISTS cells (
    key TEXT PRIMARY KEY,
    protocol TEXT NOT NULL,
    circumstances TEXT NOT NULL,
    result TEXT NOT NULL,
    accuracy REAL NOT NULL,
    finished TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now'))
) STRICT
"""


class StoreError(RuntimeError):
    """A file of results that cannot be read or written."""


@dataclass(frozen=True)
class Record:
    """A finished cell."""

    key: str
    protocol: Mapping[str, Any]  # what the result depends on
    circumstances: Mapping[str, Any]  # where it was made
    result: Mapping[str, Any]
    finished: str


class Store:
    """Finished cells. A cell is there whole or not at all; several processes may write.

    Args:
        path: of the SQLite file, made where it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise StoreError(f"{self.path}: there is no folder {str(self.path.parent)!r}; make it.")
        if self.path.is_dir():
            raise StoreError(
                f"{self.path} is a folder: give a file, such as {self.path}/results.db."
            )
        with self._errors():
            self._connection = sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)
            self._check_version()
            self._write_ahead()
            self._connection.execute("BEGIN IMMEDIATE")  # others see both of these, or neither
            self._connection.execute(_SCHEMA)
            self._connection.execute(f"PRAGMA user_version = {VERSION}")
            self._connection.execute("COMMIT")

    def __contains__(self, key: str) -> bool:
        with self._errors():
            query = "SELECT 1 FROM cells WHERE key = ?"
            return self._connection.execute(query, (key,)).fetchone() is not None

    def __len__(self) -> int:
        with self._errors():
            return int(self._connection.execute("SELECT count(*) FROM cells").fetchone()[0])

    def __iter__(self) -> Iterator[Record]:
        """Every finished cell, oldest first."""
        query = "SELECT key, protocol, circumstances, result, finished FROM cells ORDER BY rowid"
        with self._errors():
            for key, *parts, finished in self._connection.execute(query).fetchall():
                protocol, circumstances, result = (json.loads(part) for part in parts)
                yield Record(key, protocol, circumstances, result, finished)

    def put(
        self,
        key: str,
        protocol: Mapping[str, Any],
        circumstances: Mapping[str, Any],
        result: Mapping[str, Any],
    ) -> None:
        """Keep a finished cell, in place of an older one; when this returns it is on the disk."""
        parts = (json.dumps(part, sort_keys=True) for part in (protocol, circumstances, result))
        with self._errors():
            self._connection.execute(
                "INSERT OR REPLACE INTO cells (key, protocol, circumstances, result, accuracy) "
                "VALUES (?, ?, ?, ?, ?)",
                (key, *parts, result["accuracy"]),
            )

    def close(self) -> None:
        """Fold the journal into the file."""
        self._connection.close()

    def _write_ahead(self) -> None:
        """Keep a journal beside the file. SQLite itself does not wait for others to let it."""
        until = time.monotonic() + WAIT
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)
            else:
                return

    def _check_version(self) -> None:
        self._connection.execute("BEGIN")  # one look at both
        used = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        self._connection.execute("COMMIT")
        if used and version != VERSION:
            raise StoreError(
                f"{self.path} was written by another version of fata, or by another program "
                f"(format {version}; this version has {VERSION}): give another file. Nothing in "
                f"it was changed."
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"the results in {self.path}: {error}.") from error

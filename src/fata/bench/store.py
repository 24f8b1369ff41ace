"""Results in one SQLite file: a row a cell, by the hash of its protocol."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1
WAIT = 60  # seconds, for a lock
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


# What tables and figures need of a record: types by name; None: any type.
_PROTOCOL = {
    "model": str,
    "weights": {"sha256": str},
    "data": {"data": str},
    "scenario": {"name": str},
    "domains": list,
    "severity": int,
    "images": None,
    "seed": int,
    "method": str,
    "host": dict,
    "plus": None,
    "lr": None,
    "batch_size": int,
}
_RESULT = {
    "accuracy": float,
    "rows": int,
    "domains": dict,
    "collapsed_at": None,
    "curve": {"batch": list, "online": list, "entropy": list, "selected": dict},
    "classes": {"images": list, "right": list, "selected": dict},
    "entropies": {"right": list, "wrong": list},
    "seconds": float,
}


class StoreError(RuntimeError):
    """A file of results that cannot be read or written."""


@dataclass(frozen=True)
class Record:
    """A finished cell."""

    key: str
    protocol: Mapping[str, Any]  # what the result depends on
    circumstances: Mapping[str, Any]  # environment
    result: Mapping[str, Any]
    finished: str

    def check(self) -> None:
        """Raise for a record that lacks what tables and figures need."""
        try:
            _check({"protocol": _PROTOCOL, "result": _RESULT}, vars(self))
        except (TypeError, ValueError) as error:
            raise StoreError(f"cell {self.key} is malformed: {error}.") from error


class Store:
    """Finished cells. A cell is written atomically; several processes may write.

    Args:
        path: of the SQLite file, created if it is missing.
        read_only: only read an existing file.
    """

    def __init__(self, path: str | os.PathLike[str], read_only: bool = False) -> None:
        self.path = Path(path)
        if read_only:
            self._open_to_read()
            return
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

    def _open_to_read(self) -> None:
        if not self.path.is_file():
            raise StoreError(f"there is no file {str(self.path)!r}.")
        if not self.path.stat().st_size:
            raise StoreError(f"{self.path} is empty: it holds no results.")
        # Without a journal no process writes, and SQLite need not create one next to the file.
        journal = self.path.with_name(f"{self.path.name}-wal").exists()
        mode = "mode=ro" if journal else "immutable=1"
        with self._errors():
            address = f"{self.path.resolve().as_uri()}?{mode}"
            self._connection = sqlite3.connect(address, timeout=WAIT, uri=True)
            self._check_version()

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
                yield self._record(key, parts, finished)

    def _record(self, key: str, parts: Sequence[str], finished: str) -> Record:
        try:
            protocol, circumstances, result = map(json.loads, parts)
        except (TypeError, ValueError) as error:
            raise StoreError(f"{self.path}: cell {key} is malformed: {error}.") from error
        return Record(key, protocol, circumstances, result, finished)

    def put(
        self,
        key: str,
        protocol: Mapping[str, Any],
        circumstances: Mapping[str, Any],
        result: Mapping[str, Any],
    ) -> None:
        """Store a finished cell, replacing an older one; it is on the disk when this returns."""
        parts = (json.dumps(part, sort_keys=True) for part in (protocol, circumstances, result))
        with self._errors():
            self._connection.execute(
                "INSERT OR REPLACE INTO cells (key, protocol, circumstances, result, accuracy) "
                "VALUES (?, ?, ?, ?, ?)",
                (key, *parts, result["accuracy"]),
            )

    def close(self) -> None:
        """Merge the write-ahead log into the file."""
        self._connection.close()

    def _write_ahead(self) -> None:
        """Use a write-ahead log; SQLite itself does not wait for a lock here."""
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
        self._connection.execute("BEGIN")  # both from one snapshot
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


def _check(shape: Mapping[str, Any], content: Any) -> None:
    """Raise for content that lacks a part of the shape."""
    for name, kind in shape.items():
        if not isinstance(content, Mapping) or name not in content:
            raise ValueError(f"it has no {name!r}")
        if isinstance(kind, dict):
            _check(kind, content[name])
        elif kind is not None and not isinstance(content[name], kind):
            raise TypeError(f"{name!r} is {content[name]!r:.40}")

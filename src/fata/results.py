"""Results of `fata bench` as a table for pandas."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fata.bench.report.rows import COLUMNS, rows
from fata.bench.report.tables import comparisons
from fata.bench.store import Store

if TYPE_CHECKING:
    import pandas

__all__ = ["load"]


def load(*stores: str | os.PathLike[str]) -> pandas.DataFrame:
    """All cells of one or more stores, a row for each cell and domain.

    Args:
        *stores: files that `fata bench` wrote, such as `results.db`; they are only read.

    Returns:
        A frame with the columns of `fata report --format csv`: model, data, scenario, severity,
        domain, method, seed, accuracy, the settings of the run, and what it cost.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "fata.results.load needs pandas: pip install pandas. Without it, "
            "fata report results.db --format csv writes the same columns.",
            name="pandas",
        ) from error
    records = {record.key: record for path in stores for record in Store(path, read_only=True)}
    for record in records.values():
        record.check()
    return pandas.DataFrame(rows(comparisons(records.values())), columns=list(COLUMNS))

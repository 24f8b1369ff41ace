"""Cells that learned too little to tell are marked."""

import pytest

from fata.bench.marks import FEW, marks
from fata.bench.store import Record


def record(method, predictions="a", stepped=None, seed=0):
    protocol = {"model": "m", "domains": ["fog-5"], "seed": seed, "method": method}
    result = {"predictions": predictions}
    if stepped is not None:
        result["counts"] = {"stepped": stepped}
    return Record(f"{method} {seed}", protocol, {}, result, "")


@pytest.mark.parametrize(
    ("stepped", "predictions", "mark"),
    [
        (FEW, "b", None),
        (FEW - 1, "b", "few steps"),
        (0, "b", "few steps"),
        (FEW, "a", "unchanged"),
        (None, "b", None),  # of an older store, which did not count
    ],
)
def test_few_steps_and_unchanged_predictions(stepped, predictions, mark):
    found = marks([record("source"), record("tent", predictions, stepped)])
    assert found.get("tent 0") == mark


def test_methods_that_never_learn_are_not_marked():
    assert not marks([record("source", stepped=0), record("norm", stepped=0)])


def test_a_method_without_a_gradient_takes_no_steps():
    neo = record("neo", "b", stepped=0)
    assert marks([record("source"), neo]) == {"neo 0": "few steps"}
    neo.result["lr"] = None  # as a cell of it has
    assert not marks([record("source"), neo])


def test_only_the_same_stream_is_compared():
    assert not marks([record("source", seed=1), record("tent", stepped=FEW, seed=0)])
    assert marks([record("norm", seed=1), record("tent", stepped=FEW, seed=1)])

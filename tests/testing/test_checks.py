"""One table of all methods, one battery over it. A new method is covered by one line here."""

import pytest

import fata
from fata.methods import SPECS, parse
from fata.testing.cases import ROWS, Case
from fata.testing.checks import CHECKS

# Fields with which a method selects some, but not all, rows of small networks with 10 classes.
EATA = {"redundancy": 0.6, "fisher_alpha": 1.0}
TABLE = {
    "source": {},
    "norm": {},
    "tent": {},
    "eata": EATA,
    "sar": {},
    "deyo": {"plpd_threshold": 0.0},
    "cotta": {"views": 2, "restore": 0.01},
    "memo": {"views": 2},
    "fata": {},
    "tent+fata": {},
    "eata+fata": EATA,
    "sar+fata": {},
    "deyo+fata": {"plpd_threshold": 0.0},
}


def test_the_table_has_every_method():
    assert set(TABLE) == set(SPECS)


def cases():
    """Every check of every method on every network; `make test` takes the networks in turn."""
    for c, check in enumerate(CHECKS):
        for s, spec in enumerate(TABLE):
            for n, net in enumerate(fata.tiny.NAMES):
                for rows in ROWS:
                    its_turn = (c + s) % len(fata.tiny.NAMES) == n and rows == max(ROWS)
                    name = f"{check.__name__}-{spec}-{net}-b{rows}"
                    marks = () if its_turn else pytest.mark.slow
                    yield pytest.param(check, spec, net, rows, id=name, marks=marks)


@pytest.mark.parametrize(("check", "spec", "net", "rows"), list(cases()))
def test_battery(check, spec, net, rows):
    method, plus = parse(spec, **TABLE[spec])
    check(Case(method, plus, net, rows))

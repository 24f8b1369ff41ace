"""One table of all methods, one battery over it. A new method is covered by one line here."""

import pytest

import fata
from fata.check import CHECKS, ROWS, Case
from fata.methods import SPECS, parse

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


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"b{rows}")
@pytest.mark.parametrize("net", fata.tiny.NAMES)
@pytest.mark.parametrize("spec", TABLE)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_battery(check, spec, net, rows):
    method, plus = parse(spec, **TABLE[spec])
    check(Case(method, plus, net, rows))

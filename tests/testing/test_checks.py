"""One table of all methods, one battery over it. A new method is covered by one line here."""

import pytest

import fata
from fata.methods import SPECS, parse
from fata.testing.cases import ROWS, Case
from fata.testing.checks import CHECKS

# Fields with which a method selects some, but not all, rows of small networks with 10 classes.
EATA = {"redundancy": 0.6, "fisher_alpha": 1.0}
BALANCED = {"balance": True, "fata_balance": True}
TABLE = {
    "source": {},
    "norm": {},
    "tent": {},
    "eata": EATA,
    "sar": {},
    "deyo": {"plpd_threshold": 0.0},
    "roid": {},
    "zerosiam": {},
    "nctta": {},
    "neo": {},
    "cotta": {"views": 2, "restore": 0.01},
    "memo": {"views": 2},
    "fata": {},
    "tent+fata": {},
    "eata+fata": EATA,
    "sar+fata": {},
    "deyo+fata": {"plpd_threshold": 0.0},
    "roid+fata": {"correction": "additive"},
    "zerosiam+fata": {},
    "nctta+fata": {"top_k": 3},
    "neo+fata": {"alpha": 0.1},
    "neo continual": {"alpha": 0.1, "warmup": 20},
    "tent come": {"entropy": "come"},
    "eata come": {**EATA, "entropy": "come", "threshold": 0.8},
    "sar+fata come": {"entropy": "come", "threshold": 0.8},
    "tent balanced": {"balance": True},
    "eata+fata balanced": {**EATA, **BALANCED},
    "sar+fata balanced": BALANCED,
    "deyo+fata balanced": {"plpd_threshold": 0.0, **BALANCED},
    "norm blended": {"blend": True},
    "tent blended": {"blend": True},
    "eata+fata blended": {**EATA, "blend": True},
    "sar+fata blended": {"blend": True},
    "deyo+fata blended": {"plpd_threshold": 0.0, "blend": True},
}


def test_the_table_has_every_method():
    assert {name.split()[0] for name in TABLE} == set(SPECS)


def cases():
    """Every check of every method on every network; `make test` takes the networks in turn."""
    for c, check in enumerate(CHECKS):
        for s, name in enumerate(TABLE):
            for n, net in enumerate(fata.tiny.NAMES):
                for rows in ROWS:
                    its_turn = (c + s) % len(fata.tiny.NAMES) == n and rows == max(ROWS)
                    label = f"{check.__name__}-{name}-{net}-b{rows}"
                    marks = () if its_turn else pytest.mark.slow
                    yield pytest.param(check, name, net, rows, id=label, marks=marks)


@pytest.mark.parametrize(("check", "name", "net", "rows"), list(cases()))
def test_battery(check, name, net, rows):
    method, plus = parse(name.split()[0], **TABLE[name])
    check(Case(method, plus, net, rows))

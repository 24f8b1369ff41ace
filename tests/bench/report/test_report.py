"""Tables from a store, and the page in a real browser."""

import csv
import io
import re
import sqlite3

import pytest
from selenium.webdriver.support.ui import WebDriverWait
from typer.testing import CliRunner

from fata.bench.report.figures import MEAN, domains, figures
from fata.bench.report.page import page
from fata.bench.report.remarks import remarks
from fata.bench.report.rows import rows
from fata.bench.report.tables import AVERAGE, comparisons, domain_name
from fata.bench.store import Store
from fata.commands import console
from fata.commands.app import app
from fata.commands.show_comparison import show

DOMAINS = ("gaussian_noise", "fog", "contrast")
ACCURACY = {
    "source": 40.0,
    "norm": 50.0,
    "tent": 55.0,
    "tent+fata": 58.0,
    "sar": 54.0,
    "sar+fata": 5.0,
}


def result(accuracy, terms, collapsed):
    points = {"batch": [1, 2], "accuracy": [accuracy] * 2, "online": [accuracy] * 2}
    shares = {term: [30.0, 40.0] if term == "fata" else [50.0, 60.0] for term in terms}
    return {
        "rows": 128,
        "accuracy": accuracy,
        "collapsed_at": 7 if collapsed else None,
        "curve": {**points, "entropy": [1.0, 0.5], "selected": shares, "pseudo_labels": shares},
        "classes": {
            "images": [64, 64],
            "right": [60, 20],
            "selected": {term: [30, 12 if term == "fata" else 9] for term in terms},
        },
        "entropies": {"right": [2] * 50, "wrong": [1] * 50},
        "seconds": 2.0,
    }


@pytest.fixture
def store(tmp_path):
    """Three corruptions, two seeds; the second seed is written in another order."""
    store = Store(tmp_path / "r.db")
    cells = [(m, d, s) for s in (0, 1) for m in ACCURACY for d in DOMAINS[:: 1 - 2 * s]]
    for method, domain, seed in cells:
        host = method.partition("+")[0]
        protocol = {
            "model": "mini_resnet_gn",
            "weights": {"sha256": "abc"},
            "data": {"data": "embedded"},
            "scenario": {"name": "normal"},
            "severity": 5,
            "images": None,
            "domains": [f"{domain}-5"],
            "seed": seed,
            "method": method,
            "batch_size": 64,
            "lr": "paper",
            "host": {"name": host},
            "plus": {"name": "fata", "sigma": 1.0, "threshold": 0.5} if "+" in method else None,
        }
        accuracy = float(ACCURACY[method]) + DOMAINS.index(domain) + seed
        terms = [host, "fata"] if "+" in method else [host]
        made = {**result(accuracy, terms, method == "sar+fata")}
        made["domains"] = {f"{domain}-5": accuracy}
        store.put(f"{method}/{domain}/{seed}", protocol, {"device": "cpu"}, made)
    return store


def test_a_table_has_means_deviations_ranks_and_gains(store):
    (table,) = comparisons(store)
    assert table.columns == DOMAINS
    lines = {line.method: line for line in table.lines}
    assert list(lines) == ["source", "norm", "tent", "tent+fata", "sar", "sar+fata"]
    tent, plus = lines["tent"], lines["tent+fata"]
    assert tent.values["fog"].seeds == {0: 56.0, 1: 57.0}
    assert tent.average.mean == pytest.approx(56.5)
    assert tent.average.deviation == pytest.approx(0.5**0.5)
    assert plus.gain.mean == pytest.approx(3.0)
    assert (table.rank(AVERAGE, plus), table.rank(AVERAGE, tent)) == (1, 0)
    assert lines["sar+fata"].average.collapsed == 6
    assert lines["source"].gain is None


def test_a_method_whose_fields_differ_is_two_rows(store, tmp_path):
    first = next(record for record in store if record.protocol["method"] == "tent+fata")
    other = {**first.protocol, "plus": {**first.protocol["plus"], "sigma": 0.5}}
    store.put("other", other, {}, first.result)
    (table,) = comparisons(store)
    names = [line.method for line in table.lines if line.method.startswith("tent+fata")]
    assert names == ["tent+fata sigma=0.5", "tent+fata sigma=1.0"]
    incomplete = next(line for line in table.lines if line.method == names[0])
    assert incomplete.average is None


def again(store, method, accuracy, plus=None, **fields):
    """The cells of a method once more, under other settings and with one accuracy."""
    for record in [r for r in store if r.protocol["method"] == method and " " not in r.key]:
        protocol = {**record.protocol, **fields}
        if plus:
            protocol["plus"] = {**protocol["plus"], **plus}
        made = {**record.result, "accuracy": accuracy}
        made["domains"] = dict.fromkeys(record.result["domains"], accuracy)
        store.put(f"{record.key} {plus} {fields}", protocol, {}, made)


def lines_of(store, method):
    (table,) = comparisons(store)
    return [line for line in table.lines if line.method.partition(" ")[0] == method], table


def test_a_row_says_where_it_is_not_as_most_of_its_method(store):
    for sigma in (0.5, 10, 2):
        again(store, "tent+fata", 60.0, {"sigma": sigma})
    lines, table = lines_of(store, "tent+fata")
    assert [line.method.split()[1] for line in lines] == [
        "sigma=0.5",
        "sigma=1.0",
        "sigma=2",
        "sigma=10",
    ]
    assert not table.notes  # no value is shared by most
    for threshold in (0.3, 0.4, 0.6, 0.7):
        again(store, "tent+fata", 60.0, {"threshold": threshold})
    lines, table = lines_of(store, "tent+fata")
    assert [line.method for line in lines][:3] == [
        *("tent+fata", "tent+fata sigma=0.5", "tent+fata sigma=2")
    ]
    note = "tent+fata, unless its row says otherwise: sigma=1.0, threshold=0.5"
    assert table.notes == (note,)
    assert note in report(store.path, "--format", "md").output


def test_a_gain_is_over_the_host_under_the_same_settings(store):
    again(store, "tent", 50.0, lr=0.1)
    again(store, "tent+fata", 53.0, lr=0.1)
    again(store, "tent+fata", 60.5, {"sigma": 0.5})
    gains = {line.method: line.gain.mean for line in lines_of(store, "tent+fata")[0]}
    assert gains == {
        "tent+fata": pytest.approx(3.0),
        "tent+fata lr=0.1": pytest.approx(3.0),
        "tent+fata sigma=0.5": pytest.approx(60.5 - 56.5),
    }


def test_with_and_without_clean_images_are_two_rows(store):
    again(store, "tent", 90.0, fisher="embedded")
    names = {line.method: line.average.mean for line in lines_of(store, "tent")[0]}
    assert names["tent fisher=embedded"] == pytest.approx(90)
    assert names["tent fisher=None"] == pytest.approx(56.5)


def test_a_sweep_holds_all_else_equal(store):
    again(store, "tent+fata", 60.0, {"sigma": 0.5})
    again(store, "tent+fata", 10.0, {"layer": "stem"})  # also at sigma 1, and no part of the sweep
    again(store, "tent+fata", 20.0, {"sigma": 0.1}, lr=9.0)  # alone at its rate
    made = figures(lines_of(store, "tent")[1])
    swept, host = made["Sensitivity to sigma_n"].data
    assert (swept["name"], swept["x"], swept["y"]) == ("tent+fata", [0.5, 1.0], [60.0, 59.5])
    assert (host["name"], host["y"]) == ("tent", [56.5, 56.5])
    assert "Sensitivity to E0" not in made


def test_folders_keep_their_names_and_ties_their_places(store):
    first = next(iter(store))
    for method, camera, accuracy in (
        *(("source", "camera-1", 10.0), ("source", "camera-2", 20.0)),
        *(("norm", "camera-1", 30.0), ("norm", "camera-2", 40.0)),
        *(("tent", "camera-1", 30.0), ("tent", "camera-2", 40.0)),
    ):
        about = {"model": "mine", "domains": [camera], "method": method, "host": {"name": method}}
        made = {**first.result, "accuracy": accuracy, "domains": {camera: accuracy}}
        store.put(f"{method} {camera}", {**first.protocol, **about}, {}, made)
    table = next(table for table in comparisons(store) if table.model == "mine")
    assert table.columns == ("camera-1", "camera-2")
    assert "severity" not in table.title
    assert [table.rank("camera-1", line) for line in table.lines] == [0, 2, 2]


def told(result):
    """What a command said, without the frame around it."""
    return " ".join(result.output.replace("│", " ").split())


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_formats_agree_with_the_store(store):
    rows = list(csv.DictReader(io.StringIO(report(store.path, "--format", "csv").output)))
    stored = {
        (r.protocol["method"], r.protocol["domains"][0], str(r.protocol["seed"])): r.result
        for r in store
    }
    assert len(rows) == len(stored)
    for row in rows:
        kept = stored[row["method"], f"{row['domain']}-5", row["seed"]]
        assert float(row["accuracy"]) == kept["accuracy"]
    markdown = report(store.path, "--format", "md").output
    gain = "+3.00 [+3.00, +3.00] over seeds"
    best = "**58.50** | **59.50** | **60.50** | **59.50 ± 0.71**"
    assert f"| tent+fata | {best} | {gain} |" in markdown
    latex = report(store.path, "--format", "latex").output
    assert r"\multicolumn{1}{c}{Noise}" in latex
    assert r"sar+fata & 5.50$^\dagger$" in latex


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_wide_table_is_cut_into_what_fits_the_terminal(store, monkeypatch, width):
    monkeypatch.setattr(console, "width", width)
    (table,) = comparisons(store)
    with console.capture() as captured:
        show([table])
    shown = captured.get()
    frames = [line for line in shown.splitlines() if line[0] in "┏┃┡│├└"]
    assert max(map(len, frames)) <= width
    assert all(shown.count(f" {head} ") == 1 for head in ("Gauss.", "Fog", "Contr.", "average"))
    assert "58.50" in shown
    assert "…" not in shown


def test_wrong_input_is_told(tmp_path, store):
    Store(tmp_path / "empty.db")
    for arguments, why in (
        ((tmp_path / "none.db",), "there is no file"),
        ((tmp_path / "empty.db",), "no results yet"),
        ((store.path, "--format", "pdf"), "choose from html"),
        ((store.path, "-o", tmp_path / "r.pdf"), "choose from html"),
        ((store.path, "-o", tmp_path / "nowhere" / "r.html"), "there is no folder"),
    ):
        result = report(*arguments)
        assert result.exit_code == 2
        assert why in told(result)


def opened(browser, tmp_path, content):
    """The page in a browser, which notes errors of its scripts."""
    watch = "<script>window.wrong = []; window.onerror = m => window.wrong.push(m)</script>"
    path = tmp_path / "page.html"
    path.write_text(content.replace("<head>", f"<head>{watch}"), encoding="utf-8")
    browser.get(path.as_uri())
    WebDriverWait(browser, 60).until(
        lambda page: page.execute_script("return document.body.dataset.ready || window.wrong[0]")
    )
    assert browser.execute_script("return window.wrong") == []


def lines_drawn(browser):
    """Names in the first figure of a section; bands are outlines without a legend."""
    figure = "document.querySelector('section .plot').data"
    named = f"return {figure}.filter(line => !line.fill).map(line => line.name)"
    return browser.execute_script(named)


def open_details(browser):
    for details in browser.find_elements("css selector", "details:not([open]) > summary"):
        browser.execute_script("arguments[0].click()", details)
    browser.execute_async_script("setTimeout(arguments[0], 300)")  # figures of what was opened


def test_the_page_works_in_a_browser(store, tmp_path, browser):
    opened(browser, tmp_path, page(comparisons(store)))
    headline = browser.find_element("css selector", ".headline").text
    assert "unadapted 41.50 %, tent 56.50 %, tent+fata 59.50 %" in headline
    open_details(browser)
    drawn = "return document.querySelectorAll('.main-svg').length"
    assert browser.execute_script(drawn) >= 8
    row = browser.find_element("css selector", "tr[data-method='tent+fata']")
    gain = "+3.00 [+3.00, +3.00] over seeds"
    assert row.text == f"tent+fata 59.50 ± 0.71 {gain} 58.50 59.50 60.50"
    assert lines_drawn(browser) == list(ACCURACY)
    browser.find_element("css selector", "input[name=method][value='tent+fata']").click()
    browser.find_element("css selector", ".legend input[value='sar+fata']").click()
    assert not row.is_displayed()
    assert browser.find_element("css selector", "tr[data-method='sar+fata']").is_displayed()
    assert lines_drawn(browser) == ["source", "norm", "tent", "sar"]


HOSTILE = (
    "'><img src=x onerror=attack()>",
    '"><img src=x onerror=attack()>',
    "<!--<script>",
    "</script><script>attack()</script>",
    "a & b | c_d % $ # { } ~ ^ \\ [bold]x[/bold] \x1b[31m",
)


@pytest.fixture
def hostile(store, tmp_path):
    """Every name that a page shows is hostile, each in turn."""
    other = Store(tmp_path / "hostile.db")
    for number, name in enumerate(HOSTILE):
        for record in (r for r in store if r.protocol["seed"] == 0):
            domain = f"{name} {record.protocol['domains'][0]}"
            protocol = {
                **record.protocol,
                "model": f"model {name}",
                "data": {"data": f"data {name}", "images": {domain: name}},
                "scenario": {"name": f"scenario {name}", "option": name},
                "weights": {"sha256": name, "tag": name},
                "domains": [domain],
                "host": {**record.protocol["host"], "field": name},
                "lr": name,
            }
            if "+" in protocol["method"]:
                protocol["plus"] = {**protocol["plus"], "layer": name}
            protocol["method"] += f" {name}"
            made = {**record.result, "domains": {domain: record.result["accuracy"]}}
            other.put(f"{number} {record.key}", protocol, {"device": name}, made)
    return other


def test_hostile_names_are_shown_and_never_run(hostile, tmp_path, browser):
    script = "<script>window.attacked = 0; const attack = () => { window.attacked += 1 }</script>"
    tables = comparisons(hostile)
    content = page(tables, HOSTILE[0]).replace("<head>", f"<head>{script}")
    opened(browser, tmp_path, content)
    open_details(browser)
    assert browser.execute_script("return [window.attacked, window.wrong]") == [0, []]
    assert not browser.find_elements("css selector", "img, a")
    assert browser.title == HOSTILE[0]
    heads = [head.get_attribute("title") for head in browser.find_elements("css selector", "th")]
    for name in HOSTILE:
        assert any(head.startswith(name) for head in heads if head)
        assert any(f"model {name.split()[0]}" in title.text for title in section_titles(browser))
    assert len(browser.find_elements("css selector", "section")) == len(HOSTILE)
    assert not any("<" in name for name in lines_drawn(browser))  # Plotly would read markup


def section_titles(browser):
    return browser.find_elements("css selector", "section > h2")


def test_hostile_names_on_the_terminal_in_markdown_and_in_latex(hostile, monkeypatch):
    monkeypatch.setattr(console, "width", 4000)
    with console.capture() as captured:
        show(comparisons(hostile))
    shown = captured.get()
    assert "[bold]x[/bold]" in shown
    assert "\x1b" not in shown
    markdown = report(hostile.path, "--format", "md").output
    for table in markdown.split("###")[1:]:
        rows = [line for line in table.splitlines() if line.startswith("|")]
        cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        assert len(cells) == 1  # a name adds no column
    assert not re.search(r"(?<!\\)<(?:img|script|!--)", markdown)
    latex = report(hostile.path, "--format", "latex").output
    body = [line for line in latex.splitlines() if not line.startswith("%")]
    assert r"a \& b | c\_d \% \$ \# \{ \} \textasciitilde{}" in "\n".join(body)
    assert r"\textasciicircum{} \textbackslash{} [bold]x[/bold]" in "\n".join(body)
    widths = {len(re.findall(r"(?<!\\)&", line)) for line in body if line.endswith(r"\\")}
    assert len(widths) == 1


def test_reading_changes_nothing(store, tmp_path):
    """On a read-only mount nothing can be written beside the file either."""
    store.close()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert report(store.path, "--format", "md").exit_code == 0
    (tmp_path / "nothing.db").touch()
    assert "is empty" in told(report(tmp_path / "nothing.db"))
    (tmp_path / "nothing.db").unlink()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_store_that_is_written_to_is_read_to_its_last_record(store):
    """What stands in the journal counts."""
    (first, *_) = store
    store.put("last", first.protocol, {}, first.result)
    assert "last" in Store(store.path, read_only=True)


@pytest.mark.parametrize(
    ("column", "content", "why"),
    [
        ("result", "{", "is malformed"),
        ("result", "[]", "no 'accuracy'"),
        ("result", '{"accuracy": "high"}', "'accuracy' is 'high'"),
        ("protocol", "{}", "no 'model'"),
        ("protocol", '{"model": "m", "weights": 3}', "no 'sha256'"),
    ],
)
def test_a_malformed_record_is_told(store, column, content, why):
    with sqlite3.connect(store.path) as connection:
        connection.execute(f"UPDATE cells SET {column} = ? WHERE rowid = 3", (content,))
    result = report(store.path, "-o", store.path.with_suffix(".html"))
    assert result.exit_code == 2
    assert why in told(result)


def test_a_report_that_cannot_be_written_leaves_the_old_one(store, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    old = tmp_path / "old.html"
    old.write_text("the old one")
    monkeypatch.setattr("fata._files.os.fsync", full)
    result = report(store.path, "-o", old)
    assert result.exit_code == 2
    assert "No space left" in told(result)
    assert old.read_text() == "the old one"
    assert not list(tmp_path.glob(".*"))


def test_figures_show_what_fata_selects(store):
    """Whatever the order in which the store gives back the terms."""
    (table,) = comparisons(store)
    drawn = {
        line["name"]: line["y"] for line in figures(table)["Selected rows over the stream"].data
    }
    assert drawn["sar"] == [50.0, 60.0]
    assert drawn["sar+fata"] == drawn["tent+fata"] == [30.0, 40.0]


def test_the_page_needs_no_network(store):
    content = page(comparisons(store))
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=['\"]https?:", content)


def test_one_domain_alone_is_shown_at_once(store):
    """A mean of one would hide where a guard stepped in, which is told of a domain."""
    records = list(store)
    places = [domain_name(record.protocol["domains"][0]) for record in records]
    one = [record for record, place in zip(records, places, strict=True) if place == places[0]]
    assert domains(records) == [MEAN, *dict.fromkeys(places)]
    assert domains(one) == [places[0]]
    (table,) = comparisons(one)
    shown = {trace["meta"] for trace in figures(table)["Accuracy over the stream"].data}
    assert shown == {places[0]}


def test_estimates_of_accuracy_are_shown_where_there_are_some(store):
    """A store of an older version has none, and reads as before."""
    (table,) = comparisons(store)
    title = "Estimated accuracy over the stream"
    assert title not in figures(table)
    assert not [line for line in remarks(table) if "estimates" in line]
    assert {row["estimated_accuracy"] for row in rows([table])} == {None}
    records = list(store)
    some = [r for r in records if r.protocol["method"] == "tent" and r.protocol["seed"] == 0]
    for record, error in zip(some, (2.0, -3.0, 4.0), strict=True):
        curve = {name: [30.0, 40.0] for name in ("source", "adapted", "predicted")}
        record.result["health"] = {
            "source": 30.0,
            "adapted": 35.0,
            "predicted": record.result["accuracy"] + error,
            "curve": {"batch": [1, 2], **curve},
        }
    (table,) = comparisons(records)
    figure = figures(table)[title]
    assert {trace["name"] for trace in figure.data} == {"tent"}
    solid, dashed = (t for t in figure.data if t["meta"] == "fog")
    assert solid["y"] == [30.0, 40.0]
    assert "dash" not in solid["line"]
    assert dashed["y"] == [56.0, 56.0]
    assert dashed["line"]["dash"] == "dash"
    (told,) = [line for line in remarks(table) if "estimates" in line]
    assert "off by 3.0 pp on average (3 streams with a guard, at most 4.0 pp)" in told
    known = [row for row in rows([table]) if row["estimated_accuracy"] is not None]
    assert [(row["method"], row["seed"]) for row in known] == [("tent", 0)] * 3
    assert {(row["estimated_source"], row["estimated_adapted"]) for row in known} == {(30.0, 35.0)}


def test_crosses_show_where_a_guard_stepped_in(store):
    records = list(store)
    guarded = next(r for r in records if r.protocol["method"] == "sar+fata")
    why = {"odds": 2.5}
    events = [
        {**why, "batch": 2, "action": "back", "rate": 0.3},
        {**why, "batch": 9, "action": "rest", "rate": 0.1},
    ]
    guarded.result["guard"] = events
    (table,) = comparisons(records)
    (crosses,) = [
        trace
        for trace in figures(table)["Accuracy over the stream"].data
        if trace["mode"] == "markers"
    ]
    assert crosses["x"] == [2, 9]
    assert crosses["y"] == [guarded.result["curve"]["online"][1]] * 2
    assert crosses["text"] == [
        "restarts from the source weights, at 0.3 of the learning rate",
        "adaptation ends at the source weights",
    ]
    assert crosses["meta"] == "gaussian_noise"

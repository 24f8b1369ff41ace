"""The browser that tests of pages share runs their scripts."""

import pytest

from conftest import browser_programs


def test_a_page_is_loaded_and_its_script_runs(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<title>before</title><script>document.title = `${6 * 7}`</script>", "utf-8")
    browser.get(page.as_uri())
    assert browser.title == "42"
    assert browser.execute_script("return document.title + arguments[0]", "!") == "42!"


def test_the_next_page_is_a_new_one(browser):
    """One browser serves all tests: nothing of an earlier page is left."""
    browser.get("data:text/html,<script>window.left = 1</script>")
    browser.get("data:text/html,<p>next</p>")
    assert browser.execute_script("return typeof window.left") == "undefined"


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip), ("true", pytest.fail)])
def test_a_missing_browser_is_a_skip_and_in_ci_a_failure(ci, outcome, tmp_path, monkeypatch):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(outcome.Exception, match="chromium and chromedriver not found"):
        browser_programs()

"""The page at /, in a real browser."""

import contextlib
import threading

import pytest
from serving import NAMES, NOW, free_port, linked, pixels, service

from fata.serve.access import Token
from fata.serve.limits import Limits

selenium = pytest.importorskip("selenium", reason="needs selenium")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

TOKEN = "a-token-for-everything"


@contextlib.contextmanager
def page(browser, tokens=(), **options):
    """The page of a service of this process, open in the browser."""
    made, port = service(gathering=NOW, **options), free_port()
    with linked(made, tokens, host="127.0.0.1", port=port) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
            browser.get(f"http://127.0.0.1:{port}/")
            yield made
        finally:
            browser.get("about:blank")
            server.should_exit = True
            thread.join()


def learn(made, name, batches=20):
    for batch in pixels(4 * batches).split(4):
        made.submit(name, batch).result(60)


def until(browser, condition):
    return WebDriverWait(browser, 60, poll_frequency=0.05).until(lambda _: condition())


def find(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def texts(browser, selector):
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(n => n.textContent)", selector
    )


def test_the_page_shows_streams_and_its_buttons_work(browser):
    with page(browser, keep_images=True) as made:
        until(browser, lambda: find(browser, "#empty").is_displayed())
        learn(made, "camera-7")
        learn(made, "camera-8", 1)
        until(browser, lambda: texts(browser, "#streams button") == ["camera-7", "camera-8"])
        assert texts(browser, "#streams tr:first-child td")[1] == "80"
        find(browser, "#streams button").click()
        until(browser, lambda: "80 images seen" in find(browser, "#facts").text)
        assert len(texts(browser, "#classes rect")) > 1
        shown = [text.strip() for text in texts(browser, "#legend li")]
        assert shown[-1] == "others"
        assert set(shown[:-1]) <= set(NAMES)
        assert len(texts(browser, "#curves polyline")) == 2
        health = made.describe("camera-7")["health"]
        told = find(browser, "#health").text
        assert f"adapted model {100 * health['adapted']:.1f} %" in told
        assert f"source model {100 * health['source']:.1f} %" in told
        assert len(texts(browser, "#accuracy polyline")) == 2
        ends = browser.execute_script(
            "return [...document.querySelectorAll('#accuracy polyline')]"
            ".map(line => line.points[line.points.numberOfItems - 1].y)"
        )
        expected = [118 - 116 * health[model] for model in ("adapted", "source")]
        assert ends == pytest.approx(expected, abs=0.01)
        by = made.summary("camera-7")["predicted_by"]
        assert texts(browser, "#streams tr:first-child td")[4] == f"{100 * health[by]:.1f} %"
        until(browser, lambda: len(texts(browser, "#images figure")) == 12)
        assert find(browser, "#images img").get_property("naturalWidth") == 16
        find(browser, "#freeze").click()
        until(browser, lambda: find(browser, "#freeze").text == "Unfreeze")
        assert made.fleet.settings("camera-7").frozen
        find(browser, "#freeze").click()
        until(browser, lambda: find(browser, "#freeze").text == "Freeze")
        find(browser, "#reset").click()
        browser.switch_to.alert.accept()
        until(browser, lambda: " 0 images seen" in find(browser, "#facts").text)
        assert find(browser, "#health").text.startswith("None")
        assert not find(browser, "#accuracy").is_displayed()
        assert made.describe("camera-7")["batches"] == 0
        made.delete("camera-8")
        until(browser, lambda: texts(browser, "#streams button") == ["camera-7"])
        assert not find(browser, "#error").is_displayed()
        assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []


def test_images_are_not_shown_by_default(browser):
    with page(browser) as made:
        learn(made, "camera-7", 2)
        until(browser, lambda: texts(browser, "#streams button") == ["camera-7"])
        find(browser, "#streams button").click()
        until(browser, lambda: "8 images seen" in find(browser, "#facts").text)
        assert not find(browser, "#latest").is_displayed()
        assert find(browser, "#images").get_property("childElementCount") == 0


def test_a_thousand_streams_are_listed_and_searched(browser):
    with page(browser, limits=Limits(streams=1001)) as made:
        for number in range(1000):
            made.admit(f"camera-{number:04}")
        learn(made, "camera-0500", 1)
        until(browser, lambda: len(texts(browser, "#streams tr")) == 1000)
        assert find(browser, "#total").text == "1,000 streams"
        made.admit("door")
        listed = "1,001 streams, the first 1,000 listed"
        until(browser, lambda: find(browser, "#total").text == listed)
        find(browser, "#search").send_keys("-05")
        until(browser, lambda: len(texts(browser, "#streams tr")) == 100)
        browser.execute_script("document.querySelector('#streams button').click()")
        until(browser, lambda: "4 images seen" in find(browser, "#facts").text)


def test_a_token_is_asked_for_and_names_are_text(browser):
    with page(browser, [Token(TOKEN)]) as made:
        learn(made, "camera-7", 1)
        until(browser, lambda: "token" in find(browser, "#error").text)
        assert texts(browser, "#streams tr") == []
        find(browser, "#token").send_keys(TOKEN)
        until(browser, lambda: texts(browser, "#streams button") == ["camera-7"])
        until(browser, lambda: not find(browser, "#error").is_displayed())
        browser.refresh()  # it is kept in this tab
        until(browser, lambda: texts(browser, "#streams button") == ["camera-7"])
        find(browser, "#token").send_keys("-more")
        until(browser, lambda: "not valid" in find(browser, "#error").text)
        browser.execute_script("sessionStorage.clear()")


def test_the_interface_is_shown_without_a_network(browser):
    pytest.importorskip("fastapi_offline", reason="has the scripts of /docs")
    browser.get_log("browser")  # of the pages before
    with page(browser):
        until(browser, lambda: find(browser, "#empty").is_displayed())
        find(browser, "header a").click()
        until(browser, lambda: len(texts(browser, ".opblock")) > 10)
        hosts = browser.execute_script(
            "return performance.getEntriesByType('resource').map(e => new URL(e.name).host)"
        )
        assert hosts
        assert set(hosts) == {browser.execute_script("return location.host")}
        assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
        assert texts(browser, ".authorize") == []


def test_the_interface_takes_a_token(browser):
    pytest.importorskip("fastapi_offline", reason="has the scripts of /docs")
    with page(browser, [Token(TOKEN)]):
        browser.get(f"{browser.current_url}docs")
        until(browser, lambda: texts(browser, ".authorize"))
        find(browser, "button.authorize").click()
        until(browser, lambda: texts(browser, ".auth-container input"))
        find(browser, ".auth-container input").send_keys(TOKEN)
        find(browser, ".auth-btn-wrapper .authorize").click()
        find(browser, ".auth-btn-wrapper .btn-done").click()
        list_ = "[id$='streams_v1_streams_get']"
        find(browser, f"{list_} button").click()
        until(browser, lambda: texts(browser, f"{list_} .try-out__btn"))
        find(browser, f"{list_} .try-out__btn").click()
        until(browser, lambda: texts(browser, f"{list_} .execute"))
        find(browser, f"{list_} .execute").click()
        answered = f"{list_} .live-responses-table .response"
        until(browser, lambda: texts(browser, answered))
        assert "200" in find(browser, answered).text


def test_a_phone_shows_all_without_scrolling_sideways(browser):
    with page(browser, limits=Limits(streams=1000)) as made:
        for number in range(1000):
            made.admit(f"camera-{number:04}.a-long-name-of-a-stream")
        size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            until(browser, lambda: len(texts(browser, "#streams tr")) == 1000)
            browser.execute_script("document.querySelector('#streams button').click()")
            until(browser, lambda: find(browser, "#detail").is_displayed())
            wider = browser.execute_script(
                "return ['html', 'main > section:first-child', '#detail'].filter(s => {"
                "const e = document.querySelector(s); return e.scrollWidth > e.clientWidth })"
            )
            top = browser.execute_script(
                "return document.querySelector('#name').getBoundingClientRect().top"
            )
        finally:
            browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wider == []
    assert top < 844

"""The site in a browser: pages load whole from this machine, links lead on, the search finds.

With ``APEX_TE_SCREENSHOTS=<folder>`` pictures of whole pages are kept there, at both widths.
"""

import json
import os
from pathlib import Path
from urllib.parse import urldefrag, urlsplit

import pytest

PAGES = (
    "index.html", "start/quickstart.html", "guides/recipes_and_layers.html", "performance.html",
    "reference/modules.html", "reference/ops.html", "notebooks/reading_fp8_health.html",
    "huggingface.html", "start/troubleshooting.html", "404.html",
)  # fmt: skip
WIDTHS = {"desktop": 1440, "phone": 390}


def _wait(browser, script, seconds=20):
    """Returns what a script returns, once that is neither null, false nor empty."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds).until(lambda b: b.execute_script(script))


def _heading(browser):
    return _wait(browser, "return document.querySelector('article h1')?.innerText")


def _resize(browser, width, height=900):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def _text(heading):
    return heading.replace("¶", "").strip()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_whole_and_from_here_alone(browser, address, page):
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # of earlier pages
    browser.get(f"{address}/{page}")
    assert _heading(browser)
    _wait(browser, "return document.readyState === 'complete'")
    hosts = set()
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            hosts.add(urlsplit(message["params"]["request"]["url"]).hostname)
    assert hosts - {None} == {"127.0.0.1"}
    errors = [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert [e for e in errors if "favicon" not in e] == []
    broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    assert browser.execute_script(f"return {broken}") == []
    # Wide tables and code scroll by themselves; the page does not.
    width = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for pixels in WIDTHS.values():
        _resize(browser, pixels)
        assert browser.execute_script(width) <= 0, pixels
    _resize(browser, 1440)


def test_the_home_page_is_a_column_in_the_middle(browser, address):
    _resize(browser, 1440)
    browser.get(f"{address}/index.html")
    _heading(browser)
    place = "const b = document.querySelector('.md-content').getBoundingClientRect();"
    left, right = browser.execute_script(f"{place} return [b.left, innerWidth - b.right]")
    assert left > 200
    assert abs(left - right) < 20


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_names_of_recipes_are_not_broken(browser, address, width):
    _resize(browser, width)
    browser.get(f"{address}/guides/recipes_and_layers.html")
    _heading(browser)
    lines = "[...document.querySelectorAll('td code')].map(c => [c.innerText, c.getClientRects()])"
    broken = f"return {lines}.filter(([t, r]) => !/\\s/.test(t) && r.length > 1).map(([t]) => t)"
    assert browser.execute_script(broken) == []


def test_a_page_that_is_not_there_leads_on(browser, address):
    browser.get(f"{address}/404.html")
    assert _text(_heading(browser)) == "Page not found"
    links = browser.execute_script(
        "return [...document.querySelectorAll('article a[href]:not(.headerlink)')].map(a => a.href)"
    )
    assert f"{address}/index.html" in links
    browser.execute_script("document.querySelector('article label[for=__search]').click()")
    assert browser.execute_script("return document.getElementById('__search').checked")


def test_links_of_the_quickstart_lead_to_their_pages(browser, address):
    browser.get(f"{address}/start/quickstart.html")
    assert _text(_heading(browser)) == "Quickstart"
    script = (
        "return [...document.querySelectorAll('article a[href]:not(.headerlink)')].map(a => a.href)"
    )
    links = sorted({link for link in browser.execute_script(script) if link.startswith(address)})
    pages = {urldefrag(link).url for link in links}
    assert len(pages) >= 10
    for link in links:
        # By a click on the link itself, from the page that has it.
        browser.get(f"{address}/start/quickstart.html")
        browser.execute_script(
            "[...document.querySelectorAll('article a[href]')].find(a => a.href === arguments[0])"
            ".click()",
            link,
        )
        _wait(browser, f"return location.href === {json.dumps(link)}")
        assert _heading(browser), link
        fragment = urldefrag(link).fragment
        if fragment:
            there = "return !!document.getElementById(arguments[0])"
            assert browser.execute_script(there, fragment), link


@pytest.mark.parametrize(
    ("term", "page"),
    [
        ("cu_seqlens", "guides/packing.html"),
        ("InferenceParams", "guides/generation.html"),
        ("APEX_TE_CACHE_DIR", "environment.html"),
        ("nonfinite_count", "reference/regions.html"),
    ],
)
def test_the_search_finds_a_term(browser, address, term, page):
    assert f"{address}/{page}" in _found(browser, address, term)


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("loss is nan", "start/troubleshooting.html"),
        ("out of memory", "start/troubleshooting.html"),
        ("lora", "guides/lora.html"),
        ("generate", "guides/generation.html"),
        ("fsdp", "parallelism.html"),
        ("from_torch", "reference/integrations.html"),
        ("FusedAdam", "reference/optimizers.html"),
        ("Linear", "reference/modules.html"),
    ],
)
def test_the_search_finds_a_page_first(browser, address, words, page):
    assert _found(browser, address, words)[0] == f"{address}/{page}"


def _found(browser, address, words):
    """Returns the pages that a search lists, in order."""
    from selenium.webdriver.common.by import By

    browser.get(f"{address}/index.html")
    _heading(browser)
    browser.find_element(By.TAG_NAME, "body").send_keys("/")
    field = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    field.send_keys(words)
    results = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    found = [urldefrag(link).url for link in _wait(browser, results)]
    return [link.split("?")[0] for link in found]


@pytest.mark.skipif("APEX_TE_SCREENSHOTS" not in os.environ, reason="no folder for screenshots")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_screenshots(browser, address, page, width):
    _resize(browser, WIDTHS[width])
    browser.get(f"{address}/{page}")
    _heading(browser)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    _resize(browser, WIDTHS[width], min(height, 6000))
    name = page.replace("/", "_").replace(".html", f"_{width}.png")
    assert browser.save_screenshot(str(Path(os.environ["APEX_TE_SCREENSHOTS"]) / name))

"""The built site, served on this machine, and a browser."""

import functools
import http.server
import shutil
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Selenium is in the environment of the site, behind what this Python has.
sys.path += map(str, (ROOT / ".venv-docs").glob("lib/python*/site-packages"))


@pytest.fixture(scope="session")
def site():
    """The folder of the site."""
    folder = ROOT / "build" / "site"
    if not (folder / "index.html").exists():
        pytest.skip("the site is not built: make docs-test")
    return folder


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        """Prints nothing."""


@pytest.fixture(scope="session")
def address(site):
    """The address at which the site is served."""
    handler = functools.partial(_Handler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium, which finds no host but this machine."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium with chromedriver (Debian: apt install chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage",
        "window-size=1400,1000", "host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    ):  # fmt: skip
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=driver)
    found = webdriver.Chrome(options=options, service=service)
    found.set_page_load_timeout(60)
    yield found
    found.quit()

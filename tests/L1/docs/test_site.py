"""The built site, and the scripts that build it."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def _script(name):
    """Returns the module of a script, which finds those beside it."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.append(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_built_site_lead_somewhere(site):
    assert _script("build_docs").faults(site) == []


def test_wrong_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#there">b</a><a href="b.html#gone">b</a>'
        '<a href="c.html">c</a><a href="#top">a</a><a href="https://else.where/x">x</a>'
        '<script src="https://else.where/x.js"></script><img src="no.png">'
    )
    (tmp_path / "b.html").write_text('<a name="there"></a><link rel="stylesheet" href="s.css">')
    (tmp_path / "s.css").write_text('@import url("https://else.where/s.css");')
    assert _script("build_docs").faults(tmp_path) == [
        "a.html: fetches https://else.where/x.js",
        "a.html: b.html#gone: no such heading",
        "a.html: c.html leads nowhere",
        "a.html: no.png leads nowhere",
        "s.css: fetches https://else.where/s.css",
    ]


def test_pages_show_no_code_of_tests(site):
    for page in site.rglob("*.html"):
        assert "&lt;!-- test" not in page.read_text(), page
        assert "<!-- test" not in page.read_text(), page


def test_files_beside_the_pages_are_in_the_site(site):
    for name in ("examples/index.html", "benchmarks/results/transformer.png", "CONTRIBUTING.html"):
        assert (site / "repository" / name).is_file()
    notebook = (site / "notebooks" / "reading_fp8_health.html").read_text()
    assert "reading_fp8_health_4.png" in notebook
    assert (site / "notebooks" / "reading_fp8_health_4.png").is_file()


def test_the_site_names_its_version_and_its_repository():
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    addresses = _script("docs_hooks").addresses
    text = '[project.urls]\nRepository = "https://host/a/b"\nDocumentation = "https://b.host/"\n'
    assert addresses(text, {}) == ("https://host/a/b", "https://b.host/")
    workflow = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "a/b"}
    found = ("https://github.com/a/b", "https://a.github.io/b/")
    assert addresses("", workflow) == found
    assert addresses("", {}) == (None, None)


def test_the_link_to_the_repository_asks_no_other_host():
    link = (ROOT / "scripts" / "docs_theme" / "partials" / "source.html").read_text()
    assert "config.repo_url" in link
    assert "data-md-component" not in link  # by which Material's script finds what to ask for


def test_pages_of_the_site_show_its_version(site):
    version = (ROOT / "apex_te" / "_version.py").read_text().split('"')[-2]
    assert f"apex_te {version}" in (site / "index.html").read_text()


def test_a_class_shows_the_docstring_of_the_class_beside_it(site):
    text = (site / "reference" / "modules.html").read_text()
    entry = text.partition('id="apex_te.Linear"')[2].partition('id="apex_te.LayerNormLinear"')[0]
    assert entry.index("sizes of input and output") < entry.index("forward_low_rank")
    assert "LinearLayer" not in entry


def test_links_from_the_root_are_those_of_the_sites_address(tmp_path):
    (tmp_path / "index.html").write_text('<link rel="canonical" href="https://a.io/b/index.html">')
    (tmp_path / "404.html").write_text('<a href="/b/index.html">home</a><a href="/b/no.html">x</a>')
    assert _script("build_docs").faults(tmp_path) == ["404.html: /b/no.html leads nowhere"]


def test_docstrings_are_mended_for_griffe():
    pytest.importorskip("griffe", reason="griffe is not installed")
    text = (
        "Does it.\n\nArgs:\n    a, b,\n        c: one\n        of: three.\n    d: alone.\n\n"
        "Returns:\n    out: the sum.\n    rest, more: what: is left.\n\n"
        "Raises:\n    TypeError: a, b: no.\n"
    )
    assert _script("docs_docstrings").mended(text) == (
        "Does it.\n\nArgs:\n"
        "    a: one\n        of: three.\n    b: one\n        of: three.\n"
        "    c: one\n        of: three.\n"
        "    d: alone.\n\n"
        "Returns:\n    : - ``out``: the sum.\n    - ``rest, more``: what: is left.\n\n"
        "Raises:\n    TypeError: a, b: no.\n"
    )
    assert _script("docs_docstrings").mended("Is.\n\nReturns:\n    A dict: by name.") == (
        "Is.\n\nReturns:\n    : A dict: by name."
    )

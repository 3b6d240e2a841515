"""Builds the documentation site into build/site, and checks every link in it.

    python3 scripts/build_docs.py                        # make docs
    python3 scripts/build_docs.py --environment DIR      # default .venv-docs

The first call makes an environment with the versions of pyproject.toml's extra ``docs``; torch and
the project are not in it, since the reference is read from the sources' text. All else works
without the network. Warnings of MkDocs are errors, and so are links of the built pages that lead
nowhere and files that a page would fetch from elsewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from subprocess import PIPE
from urllib.parse import unquote, urlsplit

from environment import Environment

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"


def wanted() -> list[str]:
    """Returns the pinned requirements of the extra ``docs``."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"^docs = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit("docs: pyproject.toml has no extra docs")
    return re.findall(r'"([^"]+)"', found[1])


def make_environment(path: Path) -> Path:
    """Makes the environment unless it is there with these versions.

    Returns:
        Its Python.
    """
    environment, stamp = Environment(path), path / "docs.stamp"
    python = environment.python
    requirements = wanted()
    key = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == key and python.exists():
        return python
    if path.exists() and not (path / "pyvenv.cfg").exists():
        raise SystemExit(f"docs: {path} exists and is no virtual environment")
    print(f"docs: installing {' '.join(requirements)} into {path}", flush=True)
    environment.create(None)
    if not environment.pip(*requirements):
        raise SystemExit("docs: they could not be installed, see above")
    stamp.write_text(key, encoding="utf-8")
    return python


class _Page(HTMLParser):
    """Links, fetched files and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = {""}
        self.address = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what a tag refers to, and its own name."""
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and "name" in values:
            self.anchors.add(values["name"])
        if values.get("rel") == "canonical":
            self.address = values["href"]
        fetches = tag in ("script", "img", "iframe", "source", "video") or (
            tag == "link" and values.get("rel") not in ("canonical", "next", "prev", "edit")
        )
        for name in ("href", "src"):
            if name in values:
                (self.fetched if fetches else self.links).append(values[name])


def faults(site: Path) -> list[str]:
    """Returns what is wrong with the links of a built site, a line for each.

    Args:
        site: its folder.
    """
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    home = pages.get(site / "index.html")
    base = urlsplit(home.address if home else "").path.removesuffix("index.html").rstrip("/")
    found = []
    for path, page in sorted(pages.items()):
        name = path.relative_to(site)
        remote = [link for link in page.fetched if urlsplit(link).netloc]
        found += [f"{name}: fetches {link}" for link in remote]
        for link in (*page.links, *page.fetched):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            is_absolute = parts.path.startswith("/")  # those of the page for what is not found
            start = site if is_absolute else path.parent
            place = unquote(parts.path.removeprefix(base) if is_absolute else parts.path)
            target = (start / place.lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{name}: {link} leads nowhere")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {link}: no such heading")
    for path in sorted(site.rglob("*.css")):
        for link in re.findall(r"url\([\"']?((?:https?:)?//[^)\"']+)", path.read_text("utf-8")):
            found.append(f"{path.relative_to(site)}: fetches {link}")
    return found


def main() -> None:
    """Builds and checks the site."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-docs")
    parser.add_argument("--site", type=Path, default=SITE, help="folder of the site")
    args = parser.parse_args()
    python = make_environment(args.environment.absolute())
    shutil.rmtree(args.site, ignore_errors=True)
    # Signatures are formatted by ruff, which is looked for on PATH.
    variables = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "NO_MKDOCS_2_WARNING": "1",
    }
    variables.pop("PYTHONPATH", None)
    # Not --quiet, with which MkDocs does not count warnings either.
    command = [str(python), "-m", "mkdocs", "--no-color", "build", "--strict", "--site-dir"]
    done = subprocess.run(
        [*command, str(args.site.absolute())], cwd=ROOT, env=variables, text=True, stderr=PIPE
    )
    if done.returncode:
        print(re.sub(r"^INFO .*\n", "", done.stderr, flags=re.MULTILINE), file=sys.stderr)
        raise SystemExit(done.returncode)
    wrong = faults(args.site.resolve())
    if wrong:
        raise SystemExit("\n".join(["docs: links of the built site:", *wrong]))
    count = sum(1 for _ in args.site.rglob("*.html"))
    print(f"docs: {count} pages in {args.site}; python -m http.server -d {args.site} serves them")


if __name__ == "__main__":
    main()

"""Hooks of MkDocs: files outside of docs that pages link to, notebooks, and hidden test code.

They also give the site the project's version, its addresses, and its pages a weight in the search.

Pages under docs link to examples, sources and results beside them, as they must on a code host.
The site gets these files below ``repository/``: Markdown and directories as pages, sources as pages
with their text, all else as it is. Notebooks become pages with the outputs that they hold.
"""

from __future__ import annotations

import base64
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OUTSIDE = "repository"
SOURCES = {".py": "python", ".cpp": "cpp", ".cu": "cpp", ".h": "cpp", ".toml": "toml", "": "make"}

_PARTS = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)  # code blocks, and what is not
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_HIDDEN = re.compile(r"^<!-- test\b.*?-->\n?", re.MULTILINE | re.DOTALL)
_INCLUDE = re.compile(r"^<!-- from ([\w./]+): (\w+) -->$", re.MULTILINE)

# Place of each page of the site in the repository, relative to its root.
_origin: dict[str, str] = {}

# Factor of a page's hits in the search, by how its path begins; the first that fits.
_WEIGHTS = {
    "start/troubleshooting": 6.0, "start/": 4.0, "guides/": 3.0, "huggingface": 3.0,
    "migration/": 2.0, "reference/jax": 0.1, "reference/": 0.3, "decisions/": 0.3,
    "repository/CHANGELOG": 0.1, "repository/": 0.2,
}  # fmt: skip
# Words of the search that lead to a page before all others.
_KEYWORDS = {"start/troubleshooting.md": ["NaN"]}


def on_config(config: Any) -> Any:
    """Sets the site's name with the version, and the addresses of repository and site."""
    version = re.search(r'__version__ = "(.*)"', _text("apex_te/_version.py"))
    config.site_name = f"{config.site_name} {version[1] if version else ''}".strip()
    config.repo_url, config.site_url = addresses(_text("pyproject.toml"), os.environ)
    if config.repo_url:
        config.repo_name = config.repo_url.split("/", 3)[-1]
    return config


def addresses(pyproject: str, environment: Any) -> tuple[str | None, str | None]:
    """Returns the addresses of the repository and of the site, None for one that is not known.

    Args:
        pyproject: text of pyproject.toml, whose ``[project.urls]`` may have ``Repository`` and
            ``Documentation``.
        environment: variables; a workflow of GitHub Actions names its repository there.
    """
    urls = dict(re.findall(r'^(Repository|Documentation) = "(.*?)/?"$', pyproject, re.MULTILINE))
    name = environment.get("GITHUB_REPOSITORY")
    if name:
        owner, _, project = name.partition("/")
        urls.setdefault("Repository", f"{environment['GITHUB_SERVER_URL']}/{name}")
        urls.setdefault("Documentation", f"https://{owner}.github.io/{project}")
    site = urls.get("Documentation")
    return urls.get("Repository"), f"{site}/" if site else None


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _prose(text: str) -> list[str]:
    """Returns the parts of a Markdown text: prose at even places, code blocks at odd ones."""
    return _PARTS.split(text)


def _place(path: str) -> str:
    """Returns where the site has a file or folder of the repository."""
    if path.startswith("docs/"):
        inner = path.removeprefix("docs/")
        return inner.removesuffix(".ipynb") + ".md" if inner.endswith(".ipynb") else inner
    file = ROOT / path
    if file.is_dir():
        name = "README.md" if (file / "README.md").exists() else "index.md"
        return f"{OUTSIDE}/{path}/{name}"
    if file.suffix in SOURCES:
        return f"{OUTSIDE}/{path}.md"
    return f"{OUTSIDE}/{path}"


def _linked(origin: str, text: str) -> list[str]:
    """Returns the files and folders of the repository that a document links to."""
    found = []
    for part in _prose(text)[::2]:
        for _, target, _, _ in _LINK.findall(part):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
            if "://" not in target and (ROOT / path).exists():
                found.append(path)
    return found


def _page_text(path: str) -> str:
    """Returns the Markdown of a page for a file or folder outside of docs."""
    file = ROOT / path
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    if file.is_dir():
        names = sorted(item.name for item in file.iterdir() if item.suffix in (".json", ".png"))
        return "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in names), ""])
    return f"# {path}\n\n````{SOURCES[file.suffix]}\n{file.read_text(encoding='utf-8')}````\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds notebooks as pages, and what the pages link to outside of docs."""
    _origin.clear()
    texts: list[tuple[str, str]] = []
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            _add_notebook(file, files, config)
        elif file.is_documentation_page():
            _origin[file.src_uri] = f"docs/{file.src_uri}"
            text = Path(file.abs_src_path).read_text(encoding="utf-8")
            texts.append((f"docs/{file.src_uri}", text))
    # What the navigation names comes first, as if a page in the root linked to it.
    wanted = re.findall(rf"'{OUTSIDE}/([^']+)'", repr(config.nav))
    texts.append(("README.md", "".join(f"[]({path})" for path in wanted)))
    seen: set[str] = set()
    while texts:
        origin, text = texts.pop()
        for path in _linked(origin, text):
            place = _place(path)
            if path.startswith("docs/") or place in seen:
                continue
            seen.add(place)
            path = place.removeprefix(f"{OUTSIDE}/") if place.endswith("/README.md") else path
            if not place.endswith(".md"):
                files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
                continue
            content = _page_text(path)
            files.append(File.generated(config, place, content=content))
            inside = f"{path}/index.md" if place.endswith("/index.md") else path
            _origin[place] = inside
            if inside.endswith(".md"):
                texts.append((inside, content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Takes hidden test code out, puts included parts in and turns links to the site's places."""
    place = page.file.src_uri
    origin = _origin.get(place)
    markdown = _HIDDEN.sub("", markdown)
    weight = next((_WEIGHTS[start] for start in _WEIGHTS if place.startswith(start)), 1.0)
    is_source = place.startswith(OUTSIDE) and not (origin or "").endswith(".md")
    page.meta["search"] = {"exclude": True} if is_source else {"boost": weight}
    page.meta.setdefault("tags", _KEYWORDS.get(place))
    if origin is None:
        return markdown
    page.edit_url = f"{config.repo_url}/edit/main/{origin}" if config.repo_url else None
    markdown = _INCLUDE.sub(lambda found: _included(found[1], found[2]), markdown)
    base = posixpath.dirname(page.file.src_uri)

    def turned(found: re.Match[str]) -> str:
        before, target, anchor, after = found[1], found[2], found[3] or "", found[4]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if "://" in target or not (ROOT / path).exists():
            return found[0]
        return f"{before}{posixpath.relpath(_place(path), base or '.')}{anchor}{after}"

    if origin.endswith(".md"):
        parts = _prose(markdown)
        parts[::2] = [_LINK.sub(turned, part) for part in parts[::2]]
        markdown = "".join(parts)
    return markdown


def _included(path: str, name: str) -> str:
    """Returns what stands between ``<!-- name: begin -->`` and ``<!-- name: end -->`` in a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return text.partition(f"<!-- {name}: begin -->\n")[2].partition(f"<!-- {name}: end -->")[0]


def _add_notebook(file: File, files: Files, config: Any) -> None:
    """Adds the page of a notebook and its pictures."""
    stem = file.src_uri.removesuffix(".ipynb")
    cells = json.loads(Path(file.abs_src_path).read_text(encoding="utf-8"))["cells"]
    parts = []
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            text = "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
            image = output.get("data", {}).get("image/png")
            if image:
                name = f"{stem}_{number}.png"
                content = base64.b64decode("".join(image))
                files.append(File.generated(config, name, content=content))
                parts.append(f"![Output of the cell above]({posixpath.basename(name)})")
            elif text:
                parts.append(f"```text\n{text.rstrip()}\n```")
    name = posixpath.basename(file.src_uri)
    parts.insert(1, f"[Download this notebook]({name})")
    _origin[f"{stem}.md"] = f"docs/{file.src_uri}"
    files.append(File.generated(config, f"{stem}.md", content="\n\n".join(parts) + "\n"))

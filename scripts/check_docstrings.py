"""Checks the repository's docstrings, except those of tests, against the rules of style.

    python scripts/check_docstrings.py [PATH ...]     # default: packages, scripts, benchmarks
    python scripts/check_docstrings.py --shrink       # drop files that are clean from the list

In apex_te, op_builder and compatibility each public name needs a docstring, in scripts and
benchmarks each module. The docstrings that other names of scripts and benchmarks have follow the
same rules.

The words come from docs/glossary.md, the rules from CONTRIBUTING.md. Files named in
``scripts/docstrings_todo.txt`` are not yet clean. The list may only get shorter: a file in it that
is clean, or gone, is a finding, too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("apex_te", "op_builder", "compatibility")
PROGRAMS = ("scripts", "benchmarks")
TODO = ROOT / "scripts" / "docstrings_todo.txt"
GLOSSARY = ROOT / "docs" / "glossary.md"

SECTIONS = {
    "Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples", "Note",
}  # fmt: skip
# Sections of "name: description" entries.
ENTRIES = ("Args", "Attributes", "Raises")
# Headings that stand for one of SECTIONS, also where text follows on their line.
REFUSED_SECTIONS = {
    "Errors": "Raises", "Error": "Raises", "Throws": "Raises", "Arguments": "Args",
    "Parameters": "Args' or 'Attributes", "Params": "Args", "Return": "Returns", "Yield": "Yields",
    "Notes": "Note", "Usage": "Example",
}  # fmt: skip
OPENINGS = (
    "Of", "What", "Whether", "The same", "As", "One of", "Where", "How", "Which", "Those", "If",
)  # fmt: skip
# Idioms that read as translated, with the field's words for them.
_NOUNS = "multiple|module|buffer|tensor|dict|string|number|float|bool|function|class|recipe"
IDIOMS = {
    rf"(?<!there )\b(is|are) no (int|{_NOUNS})s?\b": "is not a",
    r"\btakes? the place of\b": "replaces",
    r"\bto the bit\b": "bitwise",
    r"\bat will\b": "in any combination",
    r"\bwithout a word\b": "silently",
    r"\bknows? no\b": "does not support",
    r"\bwant of\b": "lack of",
    r"\bin front of\b": "before",
    r"\bsuch a name\b": "this name",
    r"(?<!each )(?<!all )(?<!none )(?<!neither )\bof which\b": "whose, or a second sentence",
    r"\bamaxes\b(?!:)": "amax values",
    r"\bin high precision\b": "in bf16 or fp32",
}
# Methods that torch and importlib describe.
INHERITED = {"extra_repr", "find_spec", "create_module", "exec_module"}

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def glossary() -> dict[str, str]:
    """Returns the glossary's refused phrases, in lower case, each with its preferred term."""
    refused = {}
    for line in GLOSSARY.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 3 or cells[0] in ("term", "---"):
            continue
        for phrase in filter(None, cells[2].split(", ")):
            refused[phrase.lower()] = cells[0]
    return refused


def _prose(text: str) -> str:
    """Returns the text with code in double backticks blanked out."""
    return re.sub(r"``.+?``", "``", text, flags=re.DOTALL)


def _summary_findings(text: str) -> Iterator[str]:
    summary = " ".join(text.split("\n\n")[0].split())
    for opening in OPENINGS:
        if re.match(rf"{opening}\b", summary):
            yield f"summary opens with {opening!r}: begin with a verb or a noun phrase"
    if not summary.endswith((".", ":")):
        yield "summary must end with a period or a colon, before an empty line"
    # A sentence ends with a period and the next one begins with a capital or with code.
    if re.search(r"(?<!\be\.g)(?<!\bi\.e)[.?!] +(?=[A-Z`])", summary):
        yield "summary must be one sentence: put an empty line after the first"


def _section_findings(text: str) -> Iterator[str]:
    lines = text.splitlines()
    for number, line in enumerate(lines):
        heading = re.match(r"([A-Z]\w*(?: \w+)?):(\s|$)", line)
        if not heading:
            continue
        name = heading[1]
        follows = lines[number + 1] if number + 1 < len(lines) else ""
        if name in REFUSED_SECTIONS:
            yield f"section {name!r}: write {REFUSED_SECTIONS[name]!r}"
        elif name in SECTIONS:
            if line != f"{name}:" or not follows.startswith(" "):
                yield f"section {name!r} must stand alone on its line, its text indented below"
        elif line == f"{name}:" and number and follows.startswith(" "):
            yield f"section {name!r} must be one of {', '.join(sorted(SECTIONS))}"


def _entry_findings(text: str) -> Iterator[str]:
    """Yields lines that documentation generators read as entries although they name nothing."""
    section = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            section = line.removesuffix(":")
        elif section in ENTRIES and re.match(r" {4}\S(?!.*(:\s|[:,]$))", line):
            yield f"section {section!r}: indent the continued line {line.strip()!r} by four more"


def refused_words(prose: str, words: dict[str, str]) -> Iterator[str]:
    """Yields a finding for each phrase of the glossary's last column in a text without code."""
    prose = " ".join(prose.split())
    for phrase, term in words.items():
        plural = re.sub("y$", "ie", phrase) + "s"
        found = re.search(rf"\b({re.escape(phrase)}|{re.escape(plural)})\b", prose, re.IGNORECASE)
        if found:
            yield f"{found[0]!r}: the glossary says {term!r}"


def idioms(prose: str) -> Iterator[str]:
    """Yields a finding for each idiom of IDIOMS in a text without code."""
    prose = " ".join(prose.split())
    for pattern, better in IDIOMS.items():
        found = re.search(pattern, prose, re.IGNORECASE)
        if found:
            yield f"{found[0]!r}: write {better!r}"


def docstring_findings(text: str, words: dict[str, str]) -> Iterator[str]:
    """Yields what is wrong with a docstring.

    Args:
        text: the docstring, its indentation removed.
        words: refused phrases in lower case, each with its preferred term.
    """
    yield from _summary_findings(text)
    yield from _section_findings(text)
    yield from _entry_findings(text)
    prose = _prose(text)
    if "`" in prose.replace("``", ""):
        yield "code must stand in double backticks"
    yield from refused_words(prose, words)
    yield from idioms(prose)


class Classes:
    """Methods that have a docstring in each class of some sources, and in its bases by name."""

    def __init__(self, sources: Iterable[str]) -> None:
        self._bases: dict[str, set[str]] = {}
        self._documented: dict[str, set[str]] = {}
        for source in sources:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                    self._bases.setdefault(node.name, set()).update(bases)
                    methods = (item for item in node.body if isinstance(item, FUNCTIONS))
                    found = {item.name for item in methods if ast.get_docstring(item)}
                    self._documented.setdefault(node.name, set()).update(found)

    def inherits(self, owner: str, method: str) -> bool:
        """Returns True if a base of the class ``owner`` documents the method."""
        seen, names = {owner}, list(self._bases.get(owner, ()))
        while names:
            name = names.pop()
            if name in seen:
                continue
            seen.add(name)
            is_autograd = name == "Function" and method in ("forward", "backward")
            if is_autograd or method in self._documented.get(name, ()):
                return True
            names += self._bases.get(name, ())
        return False


def _needs_docstring(node: Definition, parent: Definition, classes: Classes) -> bool:
    """Returns True if the definition is public and inherits no docstring."""
    if isinstance(node, ast.Module):
        return True
    if node.name.startswith("_") or isinstance(parent, FUNCTIONS):
        return False
    if isinstance(parent, ast.ClassDef):
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        is_accessor = any(name.endswith((".setter", ".deleter")) for name in decorators)
        is_described = node.name in INHERITED or classes.inherits(parent.name, node.name)
        return not (parent.name.startswith("_") or is_accessor or is_described)
    return True


def _definitions(node: ast.AST, parent: Definition) -> Iterator[tuple[Definition, Definition]]:
    """Yields each definition below ``node`` with the one it stands in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, *FUNCTIONS)):
            yield child, parent
            yield from _definitions(child, child)
        else:
            yield from _definitions(child, parent)


def source_findings(
    source: str, words: dict[str, str], classes: Classes, is_program: bool = False
) -> Iterator[tuple[int, str, str]]:
    """Yields what is wrong in a Python source.

    Args:
        source: the text of the file.
        words: refused phrases in lower case, each with its preferred term.
        classes: classes of all files, from which methods inherit docstrings.
        is_program: only the module must have a docstring.

    Yields:
        ``(line, name, finding)``; ``name`` is the definition's, or ``"module"``.
    """
    tree = ast.parse(source)
    for node, parent in [(tree, tree), *_definitions(tree, tree)]:
        text = ast.get_docstring(node)
        name = "module" if isinstance(node, ast.Module) else node.name
        line = 1 if isinstance(node, ast.Module) else node.lineno
        if text:
            for finding in docstring_findings(text, words):
                yield line, name, finding
            is_private = isinstance(node, FUNCTIONS) and re.match(r"_[^_]", name)
            if is_private and re.search(r"^Raises:$", text, re.MULTILINE):
                yield line, name, "section 'Raises' is for public names"
        elif node is tree or (not is_program and _needs_docstring(node, parent, classes)):
            yield line, name, "docstring is missing"


def _listed() -> list[str]:
    lines = TODO.read_text().splitlines() if TODO.exists() else []
    return [line for line in lines if line and not line.startswith("#")]


def _shrink(unclean: list[str]) -> None:
    """Rewrites the list without the files that are clean or gone; adds none."""
    head = "# Files whose docstrings are not yet checked; see scripts/check_docstrings.py.\n"
    kept = [path for path in _listed() if path in unclean]
    TODO.write_text(head + "".join(f"{path}\n" for path in kept))


def _files(paths: list[Path]) -> list[Path]:
    """Returns the Python files among the paths and below them."""
    return [
        file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]


def main(arguments: list[str]) -> int:
    """Prints each finding and returns the exit status, 1 if there is any."""
    named = [Path(path).resolve() for path in arguments if not path.startswith("-")]
    packages = [ROOT / package for package in PACKAGES]
    programs = [ROOT / folder for folder in PROGRAMS]
    words, classes = glossary(), Classes(path.read_text() for path in _files(packages))
    findings = {}
    for path in _files(named or [*packages, *programs]):
        where = path.relative_to(ROOT).as_posix()
        is_program = where.split("/")[0] in PROGRAMS
        findings[where] = list(source_findings(path.read_text(), words, classes, is_program))
    unclean = [path for path, found in findings.items() if found]
    if "--shrink" in arguments and not named:
        _shrink(unclean)
    todo = [] if named else _listed()
    lines = [
        f"{path}:{line}: {name}: {finding}"
        for path in unclean
        if path not in todo
        for line, name, finding in findings[path]
    ]
    lines += [
        f"{TODO.relative_to(ROOT)}: {path} is clean or gone: remove its line (--shrink)"
        for path in todo
        if path not in unclean
    ]
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

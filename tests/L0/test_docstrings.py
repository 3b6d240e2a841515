"""The linter of docstrings finds what the rules forbid and passes what they ask for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_docstrings.py"


@pytest.fixture(scope="module")
def linter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_docstrings", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _findings(linter: ModuleType, source: str) -> list[str]:
    found = linter.source_findings(source, linter.glossary(), linter.Classes([source]))
    return [finding for _, _, finding in found]


CLEAN = '''"""Casts of tensors to FP8."""


class Base:
    """Casts by one scheme.

    Attributes:
        scale: multiplier from high precision to FP8.
    """

    def cast(self, x):
        """Returns ``x`` as FP8 data, e.g. E4M3; see ``amax``.

        Args:
            x: ``[rows, cols]``, bf16: the operand of ``y = x @ w.T``.

        Raises:
            TypeError: ``x`` is no floating-point tensor.
        """

    def _private(self):
        return None


class Inherits(Base):
    """Casts with an example:

    Example:
        ``Inherits().cast(x)``
    """

    def cast(self, x):
        def nested():
            pass

    def extra_repr(self):
        return ""
'''


def test_clean_docstrings_pass(linter: ModuleType) -> None:
    assert _findings(linter, CLEAN) == []


def test_internals_list_no_errors(linter: ModuleType) -> None:
    text = '"""Casts ``x``.\n\n    Raises:\n        A: b.\n    """'
    source = f'"""Casts."""\n\n\ndef {{}}(x):\n    {text}\n'
    assert _findings(linter, source.format("_cast")) == ["section 'Raises' is for public names"]
    for name in ("cast", "__call__"):
        assert _findings(linter, source.format(name)) == []


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("What backward needs.", "opens with 'What'"),
        ("The same for rows.", "opens with 'The same'"),
        ("If it is set.", "opens with 'If'"),
        ("Returns the scale", "must end with a period"),
        ("Returns the scale. It is fp32.", "must be one sentence"),
        ("Returns the scale. ``x`` stays.", "must be one sentence"),
        ("Returns `scale`.", "double backticks"),
        ("Casts.\n\n    Errors: ValueError if empty.", "section 'Errors': write 'Raises'"),
        ("Casts.\n\n    Arguments:\n        x: input.", "section 'Arguments': write 'Args'"),
        ("Casts.\n\n    Returns: the FP8 data.", "section 'Returns' must stand alone"),
        ("Casts.\n\n    Args:\n        x: of\n        two rows.", "indent the continued line"),
        ("Casts.\n\n    Remarks:\n        None.", "section 'Remarks' must be one of"),
        ("Writes the transposed copy.", "the glossary says 'columnwise copy'"),
        ("Writes\n    transposed\n    copies.", "the glossary says 'columnwise copy'"),
        ("Returns inverse scales.", "the glossary says 'scale_inv'"),
        ("Raises an error if it is no int.", "'is no int': write 'is not a'"),
        ("Continues to the\n    bit.", "'to the bit': write 'bitwise'"),
    ],
)
def test_what_the_rules_forbid_is_found(linter: ModuleType, docstring: str, expected: str) -> None:
    source = f'"""Module."""\n\n\ndef cast():\n    """{docstring}\n    """\n'
    found = _findings(linter, source)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\n", [(1, "module", "docstring is missing")]),
        ('"""M."""\ndef f(): pass\n', [(2, "f", "docstring is missing")]),
        ('"""M."""\ndef _f(): pass\n', []),
        ('"""M."""\nclass C: pass\n', [(2, "C", "docstring is missing")]),
        (
            '"""M."""\nclass C:\n  """C."""\n  def f(self): pass\n',
            [(4, "f", "docstring is missing")],
        ),
        ('"""M."""\nclass C:\n  """C."""\n  def __init__(self): pass\n', []),
    ],
)
def test_public_names_need_a_docstring(
    linter: ModuleType, source: str, expected: list[tuple[int, str, str]]
) -> None:
    assert list(linter.source_findings(source, {}, linter.Classes([source]))) == expected


def test_programs_need_a_docstring_of_the_module_alone(linter: ModuleType) -> None:
    source = 'def f(): pass\ndef g():\n  """What it does."""\n'
    found = list(linter.source_findings(source, {}, linter.Classes([]), is_program=True))
    assert [finding[:2] for finding in found] == [(1, "module"), (2, "g")]
    assert found[0][2] == "docstring is missing"
    assert "opens with 'What'" in found[1][2]


def test_the_list_of_unclean_files_only_shrinks(
    linter: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "clean.py").write_text('"""Casts."""\n')
    (package / "unclean.py").write_text('"""What it is."""\n')
    todo = tmp_path / "todo.txt"
    monkeypatch.setattr(linter, "ROOT", tmp_path)
    monkeypatch.setattr(linter, "PACKAGES", ("pkg",))
    monkeypatch.setattr(linter, "PROGRAMS", ("tools",))
    tool = tmp_path / "tools" / "tool.py"
    tool.parent.mkdir()
    tool.write_text('"""Which it is."""\n\n\ndef main():\n    pass\n')
    assert linter.main([]) == 1
    assert "tools/tool.py:1: module: summary opens" in capsys.readouterr().out
    tool.write_text('"""Prints."""\n\n\ndef main():\n    pass\n')
    monkeypatch.setattr(linter, "TODO", todo)
    assert linter.main([]) == 1
    assert "pkg/unclean.py:1: module: summary opens" in capsys.readouterr().out
    todo.write_text("pkg/clean.py\npkg/gone.py\npkg/unclean.py\n")
    assert linter.main([]) == 1
    out = capsys.readouterr().out
    assert "pkg/clean.py is clean or gone" in out
    assert "pkg/gone.py is clean or gone" in out
    assert "unclean" not in out
    assert linter.main(["--shrink"]) == 0
    assert todo.read_text().splitlines()[1:] == ["pkg/unclean.py"]
    todo.write_text("")
    assert linter.main(["--shrink"]) == 1, "no file is added to the list"
    assert linter._listed() == []


@pytest.mark.long
def test_the_repository_passes(linter: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert linter.main([]) == 0, capsys.readouterr().out

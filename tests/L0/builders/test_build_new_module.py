"""scripts/new_module.py: what it writes, refuses and removes, as docs/new_module.md says."""

import re
import shutil
import sys

import pytest
import tutorial
from programs import captured
from tiny_op import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "scripts"))
import new_module
from jit_templates import names

PAGE = (CHECKOUT / "docs" / "new_module.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def listing(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree with one module in it, that the script takes for its checkout."""
    for room in ("apex_te/module/_core", "tests/L0/module", "scripts"):
        (tmp_path / room).mkdir(parents=True)
    (tmp_path / "apex_te/module/linear.py").write_text("class Linear(Base):\n    pass\n")
    (tmp_path / "apex_te/module/__init__.py").write_text('_NAMES = {"Linear": "linear"}\n')
    (tmp_path / "tests/L0/ops").mkdir()
    (tmp_path / "tests/L0/ops/test_rope.py").touch()
    monkeypatch.setattr(new_module, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.long
def test_the_page_from_nothing_to_nothing(tmp_path):
    """Its commands in a copied checkout: the generated test passes, and nothing is left."""
    follow_page(tmp_path, CUDA_VISIBLE_DEVICES="")  # with a GPU: tests/L1/builders


def follow_page(tmp_path, **variables):
    checkout = tutorial.copy_checkout(tmp_path / "checkout")
    (checkout / "tests/L0/module").mkdir()
    # the suite's own libraries, which other tests use, too
    variables = tutorial.environment(checkout, APEX_TE_CACHE_DIR=tutorial.SHARED_CACHE, **variables)
    before = listing(checkout)
    outputs = [tutorial.run(["bash", "-c", line], checkout, variables) for line in COMMANDS]
    assert len(outputs) == 3
    written = {"apex_te/module/gelu_linear.py", "tests/L0/module/test_gelu_linear.py"}
    assert written <= set(outputs[0].split())
    assert re.search(r"\d+ passed", outputs[1])
    assert "failed" not in outputs[1]
    assert listing(checkout) == before


@pytest.mark.parametrize("name", ["q", "my_module", "x" * names.LONGEST])
def test_what_it_writes_is_formatted(tree, name):
    before = listing(tree)
    assert new_module.main([name]) == 0
    written = [path for path in tree.rglob("*.py") if path.stem in (name, f"test_{name}")]
    assert len(written) == 2
    for path in written:
        text = path.read_text()
        compile(text, str(path), "exec")
        assert "jit_module" not in text
        assert "JitModule" not in text
    # Which imports are the package's own is seen by its files.
    made = ["apex_te/__init__.py", "apex_te/module/_core/fused_casts.py"]
    for where in made:
        (tree / where).write_text("")
    shutil.copy(CHECKOUT / "pyproject.toml", tree)
    for command in (["check"], ["format", "--check"]):
        if shutil.which("ruff"):
            captured(["ruff", *command, "--no-cache", *map(str, written)], cwd=tree)
    assert new_module.main([name, "--remove"]) == 0
    assert listing(tree) == sorted([*before, *made, "pyproject.toml"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("linear", "linear.py has a class Linear already"),
        ("Linear2", "name must be a small letter"),
        ("x" * (names.LONGEST + 1), "name must have at most"),
        ("print", "name must not be a word of Python"),
        ("rope", "there is a test tests/L0/ops/test_rope.py already"),
    ],
)
def test_names_that_are_refused(tree, capsys, name, message):
    before = listing(tree)
    assert new_module.main([name]) == 1
    assert message in capsys.readouterr().err
    assert listing(tree) == before


def test_nothing_is_overwritten_and_changes_are_kept(tree, capsys):
    assert new_module.main(["mine", "--dry-run"]) == 0
    assert not (tree / "apex_te/module/mine.py").exists()
    assert new_module.main(["mine"]) == 0
    before = listing(tree)
    assert new_module.main(["mine"]) == 1
    path = tree / "apex_te/module/mine.py"
    path.write_text(path.read_text() + "\n# changed\n")
    assert new_module.main(["mine", "--remove"]) == 1
    assert "changed since it was generated" in capsys.readouterr().err
    assert listing(tree) == before
    table = tree / "apex_te/module/__init__.py"
    table.write_text('_NAMES = {"Mine": "mine"}\n')
    assert new_module.main(["mine", "--remove", "--force"]) == 1
    assert "apex_te/module/__init__.py names mine: take it out" in capsys.readouterr().err
    table.write_text("_NAMES = {}\n")
    assert new_module.main(["mine", "--remove", "--force"]) == 0
    assert not path.exists()
    assert new_module.main(["mine", "--remove"]) == 1
    assert "no module 'mine' was generated" in capsys.readouterr().err

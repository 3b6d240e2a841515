"""scripts/new_recipe.py: the guide from nothing to a recipe that trains; what it refuses."""

import shutil
import sys

import pytest
import tutorial
from programs import captured
from tiny_op import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "scripts"))
import new_recipe
from jit_templates import record
from jit_templates.names import LONGEST


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree with the recipes and schemes of the suite, which the script takes for its checkout."""
    root = tmp_path / "tree"
    for room in ("apex_te/recipe", "apex_te/fp8/scheme"):
        shutil.copytree(CHECKOUT / room, root / room)
    monkeypatch.setattr(new_recipe, "ROOT", root)
    return root


def contents(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.parent.name != "results"
    }


@pytest.mark.long
def test_guide_from_nothing_to_a_recipe(tmp_path):
    """Everything on the page passes, edits no file of the suite, and leaves nothing behind."""
    follow_page(tmp_path, CUDA_VISIBLE_DEVICES="")  # with a GPU: tests/L1/builders


def follow_page(tmp_path, **variables):
    checkout = tutorial.copy_checkout(tmp_path / "checkout")
    for name in ("test_statistics.py", "test_meta_device.py"):
        target = checkout / "tests" / "L0" / "module" / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / "tests" / "L0" / "module" / name, target)
    before, folders = contents(checkout), {p for p in checkout.rglob("*") if p.is_dir()}
    outputs = tutorial.follow(
        "A recipe of your own",
        checkout,
        # the suite's own libraries, which other tests use, too
        tutorial.environment(checkout, APEX_TE_CACHE_DIR=tutorial.SHARED_CACHE, **variables),
        page="new_recipe.md",
    )
    tests = [said for command, said in outputs.items() if "pytest" in command]
    assert len(tests) == 2  # one command is run again after the change
    assert all("passed" in said and "failed" not in said for said in tests)
    assert contents(checkout) == before
    left = {p for p in checkout.rglob("*") if p.is_dir() and p.name != "__pycache__"} - folders
    assert left <= {checkout / "results"}


def test_no_file_is_edited(tree):
    before = contents(tree)
    assert new_recipe.main(["per_row"]) == 0
    after = contents(tree)
    assert {where: after[where] for where in before} == before
    assert sorted(set(after) - set(before)) == [
        "apex_te/fp8/scheme/per_row.py",
        "apex_te/recipe/per_row.py",
        "scripts/jit_generated/recipe-per_row.json",
        "tests/L0/recipe/test_recipe_per_row.py",
    ]
    for where in set(after) - set(before):
        assert b"jit_recipe" not in after[where]
        assert b"JitRecipe" not in after[where]
    assert new_recipe.main(["per_row", "--remove"]) == 0
    assert contents(tree) == before


@pytest.mark.parametrize("name", ["q", "zeta2", "x" * LONGEST])
def test_generated_files_are_formatted(tmp_path, name):
    """``make lint`` passes with a new recipe, whatever the length of its name."""
    # What is a module of the package decides the order of imports.
    shutil.copytree(CHECKOUT / "apex_te", tmp_path / "apex_te")
    files = new_recipe.TEMPLATE.files(name)
    for where, text in files.items():
        (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / where).write_text(text)
        compile(text, where, "exec")
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    if shutil.which("ruff"):
        for command in (["check"], ["format", "--check"]):
            captured(["ruff", *command, "--no-cache", *files], cwd=tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad-name", "must be a small letter, then small letters"),
        ("PerRow", "must be a small letter"),
        ("../up", "must be a small letter"),
        ("class", "must not be a word of Python"),
        ("print", "must not be a word of Python"),
        ("x" * (LONGEST + 1), f"must have at most {LONGEST} characters"),
        ("block", "there is a scheme 'block' already: apex_te/fp8/scheme/block.py"),
        ("base", "there is a scheme 'base' already"),
        ("blockwise", "there is a recipe 'blockwise' already: apex_te/recipe/__init__.py"),
        ("make_recipe", "apex_te/recipe/__init__.py uses the name 'make_recipe'"),
        ("fields", "apex_te/recipe/__init__.py uses the name 'fields'"),
    ],
)
def test_names(tree, capsys, name, message):
    before = contents(tree)
    assert new_recipe.main([name]) == 1
    assert message in capsys.readouterr().err
    assert contents(tree) == before


def test_class_names(tree, capsys):
    assert new_recipe.main(["per_row"]) == 0
    assert new_recipe.main(["per__row"]) == 1
    assert "has a PerRowScaling already" in capsys.readouterr().err


def test_twice(tree, capsys):
    assert new_recipe.main(["per_row"]) == 0
    assert new_recipe.main(["per_row"]) == 1
    assert "already" in capsys.readouterr().err


def test_removal(tree, capsys):
    before = contents(tree)
    assert new_recipe.main(["per_row", "--remove"]) == 1
    assert "no recipe 'per_row' was generated" in capsys.readouterr().err
    assert new_recipe.main(["per_row", "--dry-run"]) == 0
    assert contents(tree) == before
    assert new_recipe.main(["per_row"]) == 0
    (tree / "apex_te/recipe/per_row.py").write_text("changed")
    assert new_recipe.main(["per_row", "--remove"]) == 1
    assert "changed since it was generated: apex_te/recipe/per_row.py" in capsys.readouterr().err
    assert new_recipe.main(["per_row", "--remove", "--force"]) == 0
    assert contents(tree) == before
    assert not (tree / record.FOLDER).exists()

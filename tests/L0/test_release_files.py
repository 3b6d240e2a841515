"""The files around a release agree with each other and with the checkout."""

from __future__ import annotations

import ast
import hashlib
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apex_te import __version__

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_version_is_the_same_everywhere() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", __version__)
    assert f"\nversion: {__version__}\n" in text("CITATION.cff")
    headings = re.findall(r"^## \[(.+?)\](?: - (.*))?$", text("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert headings[1][0] == __version__
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in headings[1:])
    assert f'date-released: "{headings[1][1]}"' in text("CITATION.cff")
    assert 'version = { attr = "apex_te._version.__version__" }' in text("pyproject.toml")


def test_citation_has_the_fields_that_readers_need() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "type"} <= citation.keys()
    assert f'license="{citation["license"]}"' in text("setup.py")


def test_extras_are_installable_names() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11 and later
    from packaging.requirements import Requirement

    extras = tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"]
    assert {"dev", "examples", "jax", "huggingface", "frameworks"} <= extras.keys()
    for name, requirements in extras.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", name)
        for requirement in requirements:
            assert Requirement(requirement).name.lower() != "torch", f"{name} would replace torch"


# What comes with torch or apex_te, or belongs to an option that says what to install.
WITHOUT_EXTRA = {
    "apex_te", "numpy", "packaging", "pynvml", "torch", "torchao", "transformer_engine", "wandb",
}  # fmt: skip
DISTRIBUTIONS = {"sklearn": "scikit-learn"}


@pytest.mark.parametrize(
    ("extra", "folders"),
    [
        ("examples", ("char_gpt", "digits", "pretrain", "sort", "t5_copy")),
        ("huggingface", ("huggingface",)),
    ],
)
def test_extra_brings_what_its_examples_import(extra: str, folders: tuple[str, ...]) -> None:
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"]
    imported: set[str] = set()
    own = {path.stem for path in (ROOT / "examples").rglob("*.py")}
    for folder in folders:
        for path in (ROOT / "examples" / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Import):
                    imported.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.partition(".")[0])
    others = imported - own - WITHOUT_EXTRA - set(sys.stdlib_module_names)
    missing = {DISTRIBUTIONS.get(name, name) for name in others} - set(extras[extra])
    assert not missing, f"[{extra}] lacks {missing}"


def test_checksums_hold_for_all_files_of_a_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wheels that are made one after the other have one SHA256SUMS, the CUDA ones among them."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    dist = importlib.import_module("dist")
    names = ("a.tar.gz", "a-none-any.whl", "a+cu13.whl")
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / "a+cpu.whl").write_text("removed later")
    dist.write_checksums([tmp_path / "a.tar.gz", tmp_path / "a+cpu.whl"], tmp_path)
    dist.write_checksums([tmp_path / "a.tar.gz", tmp_path / "a-none-any.whl"], tmp_path)
    (tmp_path / "a+cpu.whl").unlink()
    (tmp_path / "a.tar.gz").write_text("made again")
    dist.write_checksums([tmp_path / "a.tar.gz", tmp_path / "a+cu13.whl"], tmp_path)
    lines = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert sorted(line.split("  ")[1] for line in lines) == sorted(names)
    for line in lines:
        digest, _, name = line.partition("  ")
        assert digest == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


def jobs(path: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    # "on" is a boolean in YAML 1.1
    assert {"push", "pull_request"} <= workflow[True].keys()
    assert workflow["permissions"] == {"contents": "read"}
    return workflow["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow(path: Path) -> None:
    """Every job runs somewhere, has a limit, and its commands exist in this checkout."""
    targets = set(re.findall(r"^([a-z][\w-]*):", text("Makefile"), re.MULTILINE))
    commands = ""
    for name, job in jobs(path).items():
        assert {"runs-on", "steps", "timeout-minutes"} <= job.keys(), name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), (name, step)
            if "uses" in step:
                pinned = rf"{re.escape(step['uses'])} # v\d+\.\d+\.\d+\n"
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), (name, step)
                assert re.search(pinned, path.read_text(encoding="utf-8")), (name, step)
            if "upload-artifact" in step.get("uses", ""):
                assert step["with"]["path"] == "dist/", "with SHA256SUMS"
            commands += step.get("run", "") + "\n"
        if {"contents": "write"}.items() <= job.get("permissions", {}).items():
            assert job["if"] == "startsWith(github.ref, 'refs/tags/v')", name
    for target in re.findall(r"^ *make ([a-z][\w-]*)", commands, re.MULTILINE):
        assert target in targets, target
    for program in re.findall(r"(?<![\w/.-])((?:\.ci|scripts|tests)/[\w/.]+)", commands):
        assert (ROOT / program).exists(), program


def test_a_tag_publishes_the_files_of_every_job_that_makes_some() -> None:
    (publish,) = (jobs(path)["publish"] for path in WORKFLOWS if "publish" in jobs(path))
    makers, folders = set(), set()
    for path in WORKFLOWS:
        for name, job in jobs(path).items():
            runs = "".join(step.get("run", "") for step in job["steps"])
            if "make dist" not in runs and "make docs" not in runs:
                continue
            makers.add(name)
            if "make dist" in runs:
                rows = job.get("strategy", {}).get("matrix", {}).get("include", [{"name": "cuda"}])
                folders |= {f"wheels-{row['name']}" for row in rows}
                (upload,) = (s for s in job["steps"] if "upload-artifact" in s.get("uses", ""))
                assert upload["with"]["name"] in ("wheels-${{ matrix.name }}", "wheels-cuda")
    assert {*makers, "checks"} == set(publish["needs"])
    script = "".join(step.get("run", "") for step in publish["steps"])
    (listed,) = re.findall(r"for folder in (.*); do", script)
    assert set(listed.split()) == folders


def test_workflow_covers_checks_documentation_and_wheels() -> None:
    runs = "".join(
        step.get("run", "")
        for path in WORKFLOWS
        for job in jobs(path).values()
        for step in job["steps"]
    )
    for command in (".ci/run", "make docs", "make dist", "tests/L1/releases"):
        assert command in runs


def test_an_environment_behind_a_link_is_not_emptied(tmp_path: Path) -> None:
    """``venv --clear`` would empty what the link points to, such as another checkout's."""
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    (real / "pyvenv.cfg").touch()
    link.symlink_to(real)
    command = [sys.executable, str(ROOT / "scripts" / "environment.py"), str(link)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"{link} must not be a link" in done.stderr
    assert (real / "pyvenv.cfg").exists()

"""A prebuilt wheel with other Pythons and torch versions, where there is no compiler.

    APEX_TE_TEST_PYTHONS="/venv311/bin/python;/venv312/bin/python" pytest tests/L1/builders

names interpreters that have torch; without it the running one alone is used.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from programs import captured

CHECKOUT = Path(__file__).resolve().parents[3]
NAMED = [part for part in os.environ.get("APEX_TE_TEST_PYTHONS", "").split(";") if part]
OPS = ("amax_scale_update", "cast_transpose", "fp8_gemm")

# One training step in FP8, an op by itself, and which libraries served it.
STEP = """
import platform, sys, torch, apex_te
from apex_te.op_builder import get_builder
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.recipe import DelayedScaling
torch.manual_seed(0)
linear = apex_te.Linear(64, 32)
with apex_te.fp8_autocast(fp8_recipe=DelayedScaling()):
    loss = linear(torch.randn(16, 64)).square().mean()
loss.backward()
assert torch.isfinite(linear.weight.grad).all()
kinds = [get_builder(op).find("cpu").kind for op in {ops!r}]
kinds.append(get_builder("apex_te_core").find("cpu").kind)
print(f"{{loss.item():.9g}} {{'.'.join(kinds)}} {{apex_te.__file__}}")
print(f"Python {{platform.python_version()}}, torch {{torch.__version__}}", file=sys.stderr)
"""


def make_wheel(target, pythons):
    variables = {f"APEX_BUILD_{op.upper()}": "1" for op in OPS}
    code = f"import setuptools.build_meta as b; b.build_wheel({str(target)!r})"
    subprocess.run(
        [sys.executable, "-B", "-c", code],
        cwd=CHECKOUT,
        env={**os.environ, **variables, "APEX_BUILD_PYTHONS": ";".join(pythons)},
        check=True,
        timeout=600,
    )
    (wheel,) = target.glob("*.whl")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    return wheel


def install(python, wheel, site, umask=0o022):
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run(
        [*command, "--no-deps", "--target", str(site), str(wheel)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=True,
        umask=umask,
        timeout=300,
    )


def step(python, site, home, **variables):
    return captured(
        [python, "-B", "-c", STEP.format(ops=OPS)],
        check=False,
        cwd="/",
        env={"PYTHONPATH": str(site), "HOME": str(home), "PATH": "", **variables},
    )


@pytest.fixture
def locked_home(tmp_path):
    """A home that nobody can write, root included: it is a file."""
    home = tmp_path / "home"
    home.write_text("")
    return home


def test_wheel_runs_with_every_named_python(tmp_path, locked_home):
    pythons = [sys.executable, *NAMED]
    (tmp_path / "wheel").mkdir()
    wheel = make_wheel(tmp_path / "wheel", pythons)
    answers = []
    for i, python in enumerate(pythons):
        # 002: files that the user's own group may write, as many distributions set it
        for umask in (0o022, 0o002):
            site = tmp_path / f"site{i}_{umask}"
            install(python, wheel, site, umask)
            done = step(python, site, locked_home, APEX_TE_DISABLE_JIT="1")
            assert done.returncode == 0, done.stderr
            loss, kinds, origin = done.stdout.split()
            print(python, done.stderr.strip(), "loss", loss, kinds, flush=True)
            assert kinds == ".".join(["prebuilt"] * 4)
            assert origin == f"{site}/apex_te/__init__.py"
            assert len(done.stderr.splitlines()) == 1, done.stderr
            answers.append(loss)
    assert len(set(answers)) == 1


def test_python_that_was_not_named(tmp_path, locked_home):
    """Compiles the dispatcher alone, once, and says so; without a compiler it says what to do."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    others = [python for python in NAMED if own not in version(python)]
    if not others:
        pytest.skip(f"APEX_TE_TEST_PYTHONS names no Python but {own}")
    (tmp_path / "wheel").mkdir()
    wheel = make_wheel(tmp_path / "wheel", others[:1])
    site = tmp_path / "site"
    install(sys.executable, wheel, site)
    done = step(sys.executable, site, locked_home, APEX_TE_DISABLE_JIT="1")
    told = f"dispatchers are for Python {'.'.join(version(others[0]).split('.')[:2])}, this is"
    assert done.returncode != 0
    assert f"{told} Python {own}" in done.stderr
    cache = tmp_path / "own_cache"
    cache.mkdir(mode=0o700)
    for first in (True, False):
        path = os.environ["PATH"] if first else ""
        done = step(sys.executable, site, locked_home, PATH=path, APEX_TE_CACHE_DIR=str(cache))
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[1] == "prebuilt.prebuilt.prebuilt.cache"
        assert (told in done.stderr) == first
    assert [path.name for path in cache.rglob("*.so")] == ["apex_te_core.so"]


def version(python):
    command = [
        shutil.which(python) or python,
        "-c",
        "import platform as p; print(p.python_version())",
    ]
    return captured(command).stdout.strip()

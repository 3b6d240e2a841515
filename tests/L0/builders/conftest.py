"""Fixtures of the builder tests: one small op, an empty cache, a clean environment."""

import os
import shutil
import signal
import sys

import pytest
import torch
from attacks import library_bytes
from planted import visible_gpus
from tiny_op import CHECKOUT, quick_compiler, write_op

from op_builder.jit.build import service
from op_builder.jit.find import cache

sys.path.insert(0, str(CHECKOUT / "scripts"))

# A background job and nohup ignore these, and so would the processes that the tests signal: unlike
# that, a handler that does nothing is not inherited.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


@pytest.fixture
def root(tmp_path):
    """A project with one op."""
    return write_op(tmp_path / "project")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    """An empty user cache, and an environment and process without memory of earlier tests."""
    for name in list(os.environ):
        if name.startswith(("APEX_", "XDG_")) or name in ("MAX_JOBS", "TORCH_CUDA_ARCH_LIST"):
            monkeypatch.delenv(name)
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("APEX_TE_CACHE_DIR", str(path))
    # Tests of other folders may have used the GPU in this process.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(cache, "_fallback", None)
    monkeypatch.setattr(service, "_opened", {})
    cache.warned.clear()
    return path


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A library that answers 666 in place of 1, and is loadable."""
    return library_bytes(tmp_path_factory.mktemp("planted"), 666)


@pytest.fixture
def gpus(monkeypatch):
    """Sets which GPUs are visible; none at first."""
    return visible_gpus(monkeypatch)


@pytest.fixture
def forget(monkeypatch):
    """Drops what this process has loaded, as if it had just started."""
    return lambda: monkeypatch.setattr(service, "_opened", {})


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what an installation reads, so that a test may see whether it stays untouched."""
    target = tmp_path_factory.mktemp("install") / "checkout"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "prebuilt")
    for name in ("apex_te", "op_builder", "compatibility", "csrc"):
        shutil.copytree(CHECKOUT / name, target / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        if (CHECKOUT / name).exists():
            shutil.copy(CHECKOUT / name, target)
    return target


@pytest.fixture(scope="module")
def fake_compiler(tmp_path_factory):
    """A compiler that makes an output of any source at once."""
    return str(quick_compiler(tmp_path_factory.mktemp("compiler")))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree of empty rooms that the script takes for its checkout."""
    root = tmp_path / "tree"
    rooms = ["apex_te/ops", "apex_te/optimizers", "benchmarks/ops", "csrc", "op_builder", "scripts"]
    for room in (*rooms, "tests/L0/ops"):
        (root / room).mkdir(parents=True)
    import new_op

    monkeypatch.setattr(new_op, "ROOT", root)
    return root

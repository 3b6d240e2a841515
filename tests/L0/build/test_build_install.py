"""What an installation contains, and what it builds beforehand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny_op import CHECKOUT, Tiny, TinyCuda

from op_builder import CPUOpBuilder, CUDAOpBuilder, all_builders, get_builder
from op_builder.jit import prebuild
from op_builder.jit.errors import BuildError, SettingError, UnknownOpError


class One(CPUOpBuilder):
    NAME = "one"


class Two(CUDAOpBuilder):
    NAME = "two"


BUILDERS = {"one": One(), "two": Two()}


def chosen(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], cuda: bool = False
) -> list[str]:
    for name, value in variables.items():
        monkeypatch.setenv(f"APEX_BUILD_{name}", value)
    monkeypatch.setattr(prebuild, "cuda_expected", lambda: cuda)
    return [f"{op}:{device}" for op, device in prebuild.select(BUILDERS)]


@pytest.mark.parametrize(
    ("variables", "cuda", "expected"),
    [
        ({}, True, []),
        ({"CPP_OPS": "1"}, True, ["one:cpu", "two:cpu"]),
        ({"CUDA_OPS": "1"}, False, ["one:cpu", "two:cpu", "two:cuda"]),
        ({"CUDA_OPS": "0", "CPP_OPS": "off"}, True, []),
        ({"TWO": "1"}, False, ["two:cpu"]),
        ({"TWO": "1"}, True, ["two:cpu", "two:cuda"]),
        ({"ONE": "yes"}, True, ["one:cpu"]),
        ({"CUDA_OPS": "1", "TWO": "0"}, True, ["one:cpu"]),
        ({"CPP_OPS": "1", "ONE": "no", "TWO": "1"}, True, ["two:cpu", "two:cuda"]),
        ({"CPP_OPS": "1", "CUDA_OPS": "0", "TWO": ""}, True, ["one:cpu", "two:cpu"]),
    ],
)
def test_selection(
    variables: dict[str, str], cuda: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(monkeypatch, variables, cuda) == expected


@pytest.mark.parametrize("name", ["ONE", "CPP_OPS", "CUDA_OPS"])
def test_selection_refuses_other_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match=f"APEX_BUILD_{name} must be one of"):
        chosen(monkeypatch, {name: "maybe"})


def test_cuda_is_expected_with_an_arch_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuild, "visible_capabilities", list)
    monkeypatch.setattr(prebuild, "torch_has_cuda", lambda: False)
    assert not prebuild.cuda_expected()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert prebuild.cuda_expected()


def test_prebuilt_folder_serves(root: Path, cache_dir: Path) -> None:
    target = root / "prebuilt"
    made = prebuild.prebuild({"tiny": Tiny(root)}, [("tiny", "cpu")], str(target))
    assert made == ["tiny (cpu)"]
    assert sorted(path.name for path in target.rglob("*") if path.is_file()) == [
        "manifest.json",
        "tiny_cpu.so",
    ]
    assert list(cache_dir.iterdir()) == []
    found = Tiny(root).find()
    assert found is not None
    assert found.kind == "prebuilt"


def test_misspelt_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("APEX_BUILD_TOW", "1")
    assert prebuild.check_install(BUILDERS) == []
    assert "APEX_BUILD_TOW is set and belongs to no op" in capsys.readouterr().err


def test_prebuild_and_disabled_jit_contradict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APEX_TE_DISABLE_JIT", "1")
    assert prebuild.check_install(BUILDERS) == []
    monkeypatch.setenv("APEX_BUILD_ONE", "1")
    with pytest.raises(BuildError, match="APEX_TE_DISABLE_JIT"):
        prebuild.check_install(BUILDERS)


def test_builder_classes_are_checked() -> None:
    assert (TinyCuda.BUILD_VAR, TinyCuda.INCLUDE_FLAG) == (
        "APEX_BUILD_TINY",
        "APEX_BUILD_CUDA_OPS",
    )
    with pytest.raises(TypeError, match="INCLUDE_FLAG must be one of"):
        type("Bad", (CPUOpBuilder,), {"NAME": "bad", "INCLUDE_FLAG": "APEX_BUILD_OPS"})
    with pytest.raises(TypeError, match="NAME must be an identifier, got 'a b'"):
        type("Bad", (CPUOpBuilder,), {"NAME": "a b"})


def test_every_op_has_a_builder_and_a_loader() -> None:
    folders = {path.parent.name for path in (CHECKOUT / "csrc").glob("*/*_cpu.cpp")}
    assert folders <= set(all_builders())
    for name, builder in all_builders().items():
        assert (CHECKOUT / "compatibility" / f"{name}.py").is_file()
        assert builder.functions()
        assert builder.is_compatible()
    with pytest.raises(UnknownOpError, match="there is no op 'nothing'; there are: "):
        get_builder("nothing")


def test_importing_the_builders_is_cheap() -> None:
    code = (
        "import sys; import op_builder; op_builder.all_builders()\n"
        "print([n for n in ('torch', 'pybind11', 'ninja', 'setuptools') if n in sys.modules])"
    )
    command = [sys.executable, "-S", "-B", "-c", code]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


LOADER = """
import sys, types
names = ("subprocess.Popen", "os.posix_spawn", "os.fork")
import importlib.util
import torch
started = []
sys.addaudithook(lambda event, args: started.append(event) if event in names else None)
import apex_te
name = "apex_te.compatibility.cast_transpose"
spec = importlib.util.find_spec(name)
module = importlib.import_module(name)
assert type(module) is types.ModuleType, type(module)
assert module.__spec__.name == spec.name and module.__file__ == spec.origin
assert "cast_transpose" in dir(module) and "cast_transpose" in module.__all__
assert hasattr(module, "cast_transpose") and not hasattr(module, "nothing")
assert type(module.cast_transpose) is types.FunctionType
assert "Tensor" in module.cast_transpose.__doc__
assert importlib.reload(module) is module
assert started == [], started
try:
    module.cast_transpose()
except apex_te.op_builder.BuildError as error:
    print("disabled" if "APEX_TE_DISABLE_JIT" in str(error) else error)
"""


def test_loader_compiles_only_when_called(cache_dir: Path) -> None:
    environment = {**os.environ, "APEX_TE_DISABLE_JIT": "1", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [sys.executable, "-B", "-c", LOADER],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "disabled\n"), done.stderr
    assert list(cache_dir.iterdir()) == []


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what an installation reads, so that a test may see whether it stays untouched."""
    target = tmp_path_factory.mktemp("install") / "checkout"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "prebuilt")
    for name in ("apex_te", "op_builder", "compatibility", "csrc"):
        shutil.copytree(CHECKOUT / name, target / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        if (CHECKOUT / name).exists():
            shutil.copy(CHECKOUT / name, target)
    return target


def make_wheel(checkout: Path, target: Path, **variables: str) -> Path:
    """A wheel made by the build backend pip calls, without pip and without a network."""
    code = f"import setuptools.build_meta as b; b.build_wheel({str(target)!r})"
    target.mkdir()
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        cwd=checkout,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = target.glob("*.whl")
    return wheel


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_wheel_holds_every_source(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    before = listing(checkout)
    wheel = make_wheel(checkout, tmp_path / "wheel")
    assert listing(checkout) == before
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for part in ("csrc", "op_builder", "compatibility"):
        for path in (checkout / part).rglob("*"):
            if path.is_file():
                assert f"apex_te/{path.relative_to(checkout)}" in names
    for path in (checkout / "apex_te").rglob("*.py"):
        assert str(path.relative_to(checkout)) in names
    tops = {name.split("/")[0] for name in names}
    assert all(top == "apex_te" or top.endswith(".dist-info") for top in tops)
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]
    # the installed copy builds under the same key as the checkout
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    for name, builder in all_builders().items():
        installed = type(builder)(tmp_path / "site" / "apex_te")
        assert installed.key("cpu") == type(builder)(checkout).key("cpu"), name


def test_failing_request_fails_the_installation(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="APEX_BUILD_CPP_OPS must be one of"):
        make_wheel(checkout, tmp_path / "first", APEX_BUILD_CPP_OPS="maybe")
    with pytest.raises(AssertionError, match=r"no C\+\+ compiler found"):
        make_wheel(checkout, tmp_path / "second", APEX_BUILD_CPP_OPS="1", CXX="/nowhere/g++")


def test_prebuilt_wheel(checkout: Path, tmp_path: Path) -> None:
    wheel = make_wheel(checkout, tmp_path / "wheel", APEX_BUILD_AMAX_SCALE_UPDATE="1")
    assert "none-any" not in wheel.name
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert {Path(name).name for name in libraries} >= {
        "apex_te_core.so",
        "amax_scale_update_cpu.so",
    }
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    found = get_builder("amax_scale_update").__class__(tmp_path / "site/apex_te").find("cpu")
    assert found is not None
    assert found.kind == "prebuilt"

"""Ops outside of the suite: found through entry points, registered, or called directly."""

import json
import os
import re
import shutil
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import tutorial
from programs import captured
from tiny_op import CHECKOUT, write_op

import op_builder
from op_builder import (
    CPUOpBuilder,
    DuplicateOpError,
    UnknownOpError,
    all_builders,
    get_builder,
    register,
    user_builders,
    user_ops,
)
from op_builder.jit import cli
from op_builder.jit.inspect import report_command

BUILDER = """
from pathlib import Path
from {package} import CPUOpBuilder
class {name}(CPUOpBuilder):
    NAME = "{op}"
    ROOT = Path(__file__).parent
"""
# with the suite's header on the include path, and functions that return what they are told
HEADER = """
#pragma once
#include "common/abi/op.h"
APEX_TE_FUNCTION(echo, "x: Tensor, value: int -> int")
"""
SOURCE = """
#include "echo/echo.h"
APEX_TE_LIBRARY()
APEX_TE_DEFINE(echo) {
  args.tensor().has_dtype({apex_te::DType::kFloat32});
  args.set_result(args.integer());
}
"""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(op_builder.builder, "registered", {})
    monkeypatch.setattr(user_ops, "_warned", set())


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Makes an installed package of a builder's text, with an entry point, and returns its path."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)

    def make(package, op, text=None, value="", version="1.0"):
        folder, info = site / package, site / f"{package}-{version}.dist-info"
        folder.mkdir(parents=True)
        info.mkdir()
        name = f"{package.title().replace('_', '')}Builder"
        text = BUILDER if text is None else text
        (folder / "__init__.py").write_text(
            text.format(package="op_builder", name=name, op=op) if "{op}" in text else text
        )
        (info / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
        entry = f"{op} = {value or f'{package}:{name}'}"
        (info / "entry_points.txt").write_text(f"[{user_ops.GROUP}]\n{entry}\n")
        return folder

    yield make
    for name in [name for name in sys.modules if name.startswith("their_")]:
        del sys.modules[name]


def test_entry_point(install):
    folder = install("their_ops", "echo")
    builder = get_builder("echo")
    assert builder.root == folder.resolve()
    assert builder.BUILD_VAR == "APEX_BUILD_ECHO"
    assert get_builder("echo") is builder
    assert user_builders() == {"echo": builder}
    assert "echo" not in all_builders()
    with pytest.raises(UnknownOpError, match=r"there is no op 'nothing'.*other packages: echo$"):
        get_builder("nothing")
    with pytest.raises(UnknownOpError, match=r"there is no op 'ehco'; did you mean 'echo'\?$"):
        get_builder("ehco")


def test_same_name_in_two_packages(install):
    install("their_first", "echo")
    install("their_second", "echo")
    install("their_third", "fine")
    both = "their_first:TheirFirstBuilder of their.first 1.0.*their_second:TheirSecondBuilder"
    with pytest.raises(DuplicateOpError, match=f"NAME = 'echo': {both}"):
        get_builder("echo")
    with pytest.warns(RuntimeWarning, match=f"left out two builders.*{both}"):
        assert list(user_builders()) == ["fine"]
    assert "their_first" not in sys.modules


def test_name_of_the_suite(install):
    install("their_ops", "rope")
    assert get_builder("rope").root == CHECKOUT
    with pytest.warns(RuntimeWarning, match="their_ops.* the suite has an op 'rope' already"):
        assert user_builders() == {}


@pytest.mark.parametrize(
    ("text", "value", "message"),
    [
        ("raise OSError('no libfoo.so')", "", "cannot be imported: OSError: no libfoo.so"),
        ("import nothing_like_it", "", "cannot be imported: ModuleNotFoundError"),
        ("", "their_ops:Missing", "cannot be imported: AttributeError"),
        ("TheirOpsBuilder = 3", "", "must be a subclass of OpBuilder with NAME = 'echo', got 3"),
        (BUILDER.replace("{op}", "other"), "", "with NAME = 'echo', got <class"),
        ("import sys; sys.exit(3)", "", "cannot be imported: SystemExit"),
    ],
)
def test_broken_package_is_named_and_hurts_nobody(install, text, value, message):
    install("their_ops", "echo", text.format(package="op_builder", name="TheirOpsBuilder"), value)
    install("their_other", "fine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_builder("rope").NAME == "rope"
        assert get_builder("fine").NAME == "fine"
    with pytest.raises(UnknownOpError, match=f"their_ops:.* of their.ops 1.0 .*{message}"):
        get_builder("echo")
    with pytest.warns(RuntimeWarning, match=f"left out echo: .*of their.ops 1.0.*{message}"):
        assert list(user_builders()) == ["fine"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        user_builders()


ROCM_BUILDER = """
from pathlib import Path
from op_builder import CUDAOpBuilder
class TheirOpsBuilder(CUDAOpBuilder):
    BUILD_VAR = "APEX_BUILD_ECHO"
    INCLUDE_FLAG = "APEX_BUILD_CPU_OPS"
    NAME = "echo"
    ROOT = Path(__file__).parent
    def __init__(self):
        super().__init__(name=self.NAME)
    def absolute_name(self):
        return "apex." + self.name
    def sources(self):
        return ["csrc/echo.cpp"]
    def include_paths(self):
        return ["csrc/"]
    def cxx_args(self):
        return super().cxx_args() + self.version_dependent_macros() + self.generator_args()
    def nvcc_args(self):
        return ["-O3"] + self.version_dependent_macros() + ([] if self.is_rocm_pytorch() else [])
"""


def test_builder_of_rocms_apex_loads(install):
    """Its group, its constructor and its helpers; what it builds is an extension of torch."""
    install("their_ops", "echo", ROCM_BUILDER)
    builder = get_builder("echo")
    assert builder.INCLUDE_FLAG == "APEX_BUILD_CPP_OPS"
    assert (builder.name, builder.BINDING, builder.DEVICES) == ("echo", "pybind11", ("cpu",))
    assert "-DVERSION_GE_1_5" in builder.cxx_args()
    assert CPUOpBuilder.BINDING == "c"


def report_rows(capsys):
    """The report's rows of all libraries by op, none of which may fail the report."""
    assert cli.main(["report", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    rows = {row["op"]: row for row in facts["libraries"]}
    text = "\n".join(report_command.lines(facts))
    assert all(f"{name} (-): " in text for name, row in rows.items() if row["device"] == "-")
    return rows


@pytest.mark.parametrize(
    ("change", "device", "told"),
    [
        (("name=self.NAME", "nom=self.NAME"), "-", "TypeError.*unexpected keyword argument 'nom'"),
        (("", ""), "cpu", "csrc/echo.cpp"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (("name=self.NAME", "name='other'"), "-", "TypeError.*name must be NAME = 'echo'"),
                (("CPU_OPS", "CPU OPS"), "-", "TypeError.*INCLUDE_FLAG must be the name of"),
                (("generator_args", "gone"), "-", "AttributeError.*has no attribute 'gone'"),
                (('return ["csrc/echo.cpp"]', "return self.gone"), "-", "AttributeError.*'gone'"),
            )
        ),
    ],
)
def test_broken_builder_is_a_row_of_the_report(install, capsys, change, device, told):
    folder = install("their_ops", "echo", ROCM_BUILDER.replace(*change))
    install("their_other", "fine")
    if change != ("", ""):  # else the source is missing
        (folder / "csrc").mkdir()
        (folder / "csrc" / "echo.cpp").write_text("")
    row = report_rows(capsys)["echo"]
    if device == "-":
        with pytest.warns(RuntimeWarning, match="left out echo: "):
            assert cli.main(["list"]) == 0
    assert (row["state"], row["device"]) == ("cannot", device)
    assert re.search(told, row["reason"]), row["reason"]


@pytest.mark.long
def test_broken_builder_beside_the_suites_is_a_row_of_the_report(tmp_path, monkeypatch, capsys):
    (tmp_path / "their_file.py").write_text(ROCM_BUILDER.replace("CPU_OPS", "CPU OPS"))
    names = [*op_builder.builder_names(), "their_file"]
    monkeypatch.setattr(op_builder, "__path__", [*op_builder.__path__, str(tmp_path)])
    with monkeypatch.context() as patch:
        patch.setattr(op_builder, "builder_names", lambda: names)
        with pytest.raises(UnknownOpError, match=r"op_builder.their_file cannot be imported: Type"):
            get_builder("their_file")
        row = report_rows(capsys)["their_file"]
        assert cli.main(["list"]) == 2
        assert "apex_te: their_file: its builder" in capsys.readouterr().err
    assert (row["state"], row["device"]) == ("cannot", "-")
    assert "INCLUDE_FLAG must be the name of" in row["reason"]


def test_registering(tmp_path):
    class Echo(CPUOpBuilder):
        NAME = "echo"
        ROOT = tmp_path

    class Other(CPUOpBuilder):
        NAME = "echo"
        ROOT = tmp_path

    class Rope(CPUOpBuilder):
        NAME = "rope"
        ROOT = tmp_path

    builder = register(Echo)
    assert get_builder("echo") is builder
    assert get_builder("echo") is register(builder)
    with pytest.raises(DuplicateOpError, match=r"NAME = 'echo': .*\.Echo \(.*\.Other \("):
        register(Other)
    with pytest.raises(DuplicateOpError, match=r"\.Rope \(.*the suite has an op 'rope' already"):
        register(Rope)
    with pytest.raises(UnknownOpError, match="must have a NAME"):
        register(CPUOpBuilder)
    again = type("Echo", (CPUOpBuilder,), {"NAME": "echo", "ROOT": tmp_path})
    again.__qualname__, again.__module__ = Echo.__qualname__, Echo.__module__
    assert type(register(again)) is again  # a module that was reloaded
    assert type(get_builder("echo")) is again


def test_suites_ops_look_for_no_entry_points(monkeypatch):
    code = (
        "import sys; from op_builder import all_builders, get_builder\n"
        "get_builder('rope').find('cpu'); get_builder('apex_te_core'); all_builders()\n"
        "print('importlib.metadata' in sys.modules)"
    )
    command = [sys.executable, "-S", "-B", "-c", code]
    done = captured(command, check=False, cwd=CHECKOUT)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_key_tells_neither_place(tmp_path, monkeypatch):
    """The suite's headers are found and count, wherever the two are installed."""

    def write(root):
        (root / "csrc" / "echo").mkdir(parents=True)
        (root / "csrc" / "echo" / "echo.h").write_text(HEADER)
        (root / "csrc" / "echo" / "echo_cpu.cpp").write_text(SOURCE)
        return root

    class Echo(CPUOpBuilder):
        NAME = "echo"

    before = Echo(write(tmp_path / "one")).key("cpu")
    assert Echo(write(tmp_path / "two" / "deeper")).key("cpu") == before
    suite = tmp_path / "installed"
    shutil.copytree(CHECKOUT / "csrc" / "common", suite / "csrc" / "common")
    for module in (op_builder.spec, op_builder.jit.find.key):
        monkeypatch.setattr(module, "SUITE", suite)
    assert Echo(tmp_path / "one").key("cpu") == before
    assert Echo(write(suite / "inside")).key("cpu") == before
    with (suite / "csrc/common/abi/op.h").open("a") as file:
        file.write("//\n")
    assert Echo(tmp_path / "one").key("cpu") != before


def test_own_headers_come_first(tmp_path):
    class Tiny(CPUOpBuilder):
        NAME = "tiny"

    import ctypes

    root = write_op(tmp_path / "project", value=7)
    (root / "csrc" / "common" / "abi").mkdir()
    (root / "csrc/common/value.h").rename(root / "csrc/common/abi/op.h")
    header = root / "csrc" / "tiny" / "tiny.h"
    header.write_text(header.read_text().replace("common/value.h", "common/abi/op.h"))
    assert ctypes.CDLL(Tiny(root).open().proc_path).tiny() == 7


def test_forgotten_root_is_hinted_at():
    class Echo(CPUOpBuilder):
        NAME = "echo"

    hint = "an op outside of the suite sets ROOT to the folder that holds its csrc"
    with pytest.raises(UnknownOpError, match=f"no cpu source.*{hint}"):
        Echo().open()
    with pytest.raises(UnknownOpError, match=f"header .*echo.h does not exist.*{hint}"):
        Echo().functions()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("pip") is None, reason="needs pip")
def test_tutorial_of_a_package(tmp_path):
    """The page's second section, installed with pip into a folder of its own; then a broken one."""
    site = tmp_path / "site-packages"
    variables = tutorial.environment(
        tmp_path,
        PYTHONPATH=os.pathsep.join((str(CHECKOUT), str(site))),
        PIP_TARGET=str(site),
        PIP_NO_DEPS="1",
        PIP_NO_INDEX="1",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        HOME=str(tmp_path),
    )
    outputs = tutorial.follow("An op in a package of your own", tmp_path, variables)
    assert " passed" in outputs["python -m pytest my_kernels/tests"]
    assert (site / "my_kernels" / "csrc" / "axpy" / "axpy_cpu.cpp").is_file()
    code = """
        import sys, torch, warnings
        warnings.simplefilter("error")
        from apex_te import runtime
        from apex_te.op_builder import get_builder
        assert "my_kernels" not in sys.modules
        out, x = torch.empty(3), torch.ones(3)
        runtime.function("axpy", "axpy_fwd")(x, x, out, 4.0)       # by its entry point
        assert out.tolist() == [5.0] * 3
        module = get_builder("axpy").load()
        import apex_te.compatibility.axpy as imported
        assert imported is module and module.__all__ == ["axpy_fwd"]
        assert module.__spec__.origin == module.__file__ and "my_kernels" in module.__file__
        print(get_builder("axpy").find("cpu") is not None)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert tutorial.run(command, Path("/"), variables) == "True\n"

"""Ops with BINDING = "pybind11": flags, key, exports, and a loader that builds on the first call.

A few lines stand in for pybind11 here, which alone takes ten seconds to compile; extensions with
the real one and torch's headers are in tests/L1/builders.
"""

import importlib
import importlib.machinery
import inspect
import os
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from apex_te.compatibility import apex, finder
from apex_te.compatibility.apex import _finder
from apex_te.op_builder import (
    BuildError,
    CPUOpBuilder,
    CUDAOpBuilder,
    DuplicateOpError,
    UnknownOpError,
    register,
)
from apex_te.op_builder import builder as builders
from apex_te.op_builder.jit.backends import library, pybind
from apex_te.op_builder.jit.backends.pybind import read_exports
from apex_te.op_builder.jit.build import service
from apex_te.op_builder.jit.errors import CompileError, HeaderNotFoundError
from programs import captured
from tiny_op import CHECKOUT, logging_compiler

import apex_te

STAND_IN = """
#pragma once
#include <Python.h>
struct Module {
  PyObject* object;
  void def(const char* name, PyCFunction function) {
    PyMethodDef* method = new PyMethodDef{name, function, METH_VARARGS, nullptr};
    PyModule_AddObject(object, name, PyCFunction_New(method, nullptr));
  }
};
template <typename T>
struct class_ {
  class_(Module& m, const char* name) {
    Py_INCREF(&PyLong_Type);
    PyModule_AddObject(m.object, name, reinterpret_cast<PyObject*>(&PyLong_Type));
  }
};
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define PYBIND11_MODULE(name, m)                                                     \\
  static void define_all(Module& m);                                                 \\
  extern "C" __attribute__((visibility("default"))) PyObject* JOIN(PyInit_, name)() { \\
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "x", nullptr, -1};       \\
    Module module{PyModule_Create(&definition)};                                     \\
    define_all(module);                                                              \\
    return module.object;                                                            \\
  }                                                                                  \\
  static void define_all(Module& m)
"""
SOURCE = """
#include "stand_in.h"
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(VALUE); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("answer", answer);
  class_<long>(m, "Number");
}
"""


class Ext(CPUOpBuilder):
    """The extension that the tests build."""

    NAME = "tiny_ext"
    BINDING = "pybind11"

    def cxx_args(self):
        return ["-DVALUE=42"]


def write(root, source=SOURCE):
    folder = root / "csrc" / "tiny_ext"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stand_in.h").write_text(STAND_IN)
    (folder / "tiny_ext.cpp").write_text(source)
    return root


@pytest.fixture
def root(tmp_path):
    return write(tmp_path / "project")


@pytest.fixture(autouse=True)
def fresh(cache_dir, monkeypatch):
    """A process that knows no extension yet."""
    monkeypatch.setattr(service, "_opened", {})
    monkeypatch.setattr(service, "_extensions", {})
    monkeypatch.setattr(builders, "registered", {})
    yield
    sys.modules.pop("apex_te.tiny_ext", None)


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    """How often the compiler ran since the test began."""
    compiler, log = logging_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    return lambda: len(log.read_text().split())


def loader_module(builder):
    """A module of tiny_ext, as the finder of the ops fills it."""
    register(builder)
    module = types.ModuleType("loader_of_tiny_ext", "Loader of tiny_ext.")
    finder.define_loader(vars(module), builder.NAME)
    return module


# Flags and key ------------------------------------------------------------------------------------


def test_folders_are_those_of_torch(root):
    from torch.utils import cpp_extension

    folders = pybind.include_paths(Ext(root))
    assert set(cpp_extension.include_paths()) <= set(folders)
    flags = pybind.link_flags(Ext(root))
    assert {f"-L{path}" for path in cpp_extension.library_paths()} <= set(flags)
    assert set(cpp_extension.COMMON_NVCC_FLAGS) <= set(pybind.NVCC_ARGS)
    for folder in folders:
        assert os.path.isdir(folder)


def test_base_flags_stay(root):
    flags = Ext(root).compile_flags("cpu")
    assert "-DTORCH_EXTENSION_NAME=tiny_ext" in flags
    assert f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}" in flags
    assert flags[-1] == "-DVALUE=42"
    assert {"-ltorch_python", "-lc10"} <= set(library.link_flags(Ext(root), "cpu"))


def test_cuda_extension_links_torchs_cuda(root, monkeypatch):
    class Cuda(CUDAOpBuilder):
        NAME = "tiny_ext"
        BINDING = "pybind11"

    assert Cuda.DEVICES == ("cpu",)  # one library for all devices
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert {"-lc10_cuda", "-ltorch_cuda"} <= set(library.link_flags(Cuda(root), "cpu"))
    assert not {"-lc10_cuda", "-ltorch_cuda"} & set(library.link_flags(Ext(root), "cpu"))
    assert not Cuda(root).needs_archs("cpu")
    (root / "csrc" / "tiny_ext" / "kernel.cu").write_text("")
    assert Cuda(root).needs_archs("cpu")
    assert "-lc10_cuda" in library.link_flags(Ext(root), "cuda")


@pytest.mark.parametrize(
    ("where", "attribute", "value"),
    [
        (torch, "__version__", "2.13.0+cpu.other"),
        (torch._C, "_GLIBCXX_USE_CXX11_ABI", not torch._C._GLIBCXX_USE_CXX11_ABI),
        (torch.version, "cuda", "12.9"),
        (torch.version, "hip", "6.4"),
        (pybind, "soabi", lambda: ".cpython-314-x86_64-linux-gnu.so"),
    ],
)
def test_key_tells_torch_and_python(root, monkeypatch, where, attribute, value):
    from apex_te.op_builder import get_builder

    before, plain = Ext(root).key("cpu"), get_builder("rope").key("cpu")
    monkeypatch.setattr(where, attribute, value)
    assert Ext(root).key("cpu") != before
    assert get_builder("rope").key("cpu") == plain


def test_key_tells_the_sources_not_the_place(root, tmp_path):
    before = Ext(root).key("cpu")
    assert Ext(write(tmp_path / "elsewhere")).key("cpu") == before
    (root / "csrc" / "tiny_ext" / "stand_in.h").write_text(STAND_IN + "//")
    assert Ext(root).key("cpu") != before


def test_without_torch(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(HeaderNotFoundError, match=r"tiny_ext: .*built against torch.*--no-build-i"):
        Ext(root).key("cpu")


def test_builder_of_rocms_apex_builds(root):
    """The module keeps its name below apex, which need not be installed."""

    class Rocm(CUDAOpBuilder):
        NAME = "tiny_ext"
        INCLUDE_FLAG = "APEX_BUILD_CPU_OPS"
        ROOT = root

        def __init__(self):
            super().__init__(name=self.NAME)

        def absolute_name(self):
            return f"apex.{self.NAME}"

        def include_paths(self):
            return ["csrc/"]

        def cxx_args(self):
            return [*super().cxx_args(), *self.version_dependent_macros(), "-DVALUE=43"]

    try:
        assert Rocm().load().answer() == 43
        assert sys.modules["apex.tiny_ext"].answer() == 43
    finally:
        sys.modules.pop("apex.tiny_ext", None)


def test_extension_of_the_suite_at_top_level(root, monkeypatch, compilations):
    """As apex's extensions: after ``install()``, and compiled by the first call."""
    monkeypatch.setitem(apex_te.op_builder._suite, "tiny_ext", Ext(root))
    names = lambda: ["rope", "tiny_ext"]  # noqa: E731
    monkeypatch.setattr(apex_te.op_builder, "builder_names", names)
    monkeypatch.setattr(_finder, "builder_names", names)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tiny_ext")
    apex.install()
    try:
        module = importlib.import_module("tiny_ext")
        assert compilations() == 0
        assert module.answer() == 42
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("rope")
    finally:
        apex.uninstall()
    assert "tiny_ext" not in sys.modules


def test_classes_are_checked():
    for exports in ("answer", ("a b",)):
        with pytest.raises(TypeError, match="EXPORTS must be a tuple of identifiers"):
            type("Bad", (CPUOpBuilder,), {"NAME": "bad", "EXPORTS": exports})
    with pytest.raises(TypeError, match='BINDING must be "c" or "pybind11"'):
        type("Bad", (CPUOpBuilder,), {"NAME": "bad", "BINDING": "nanobind"})


def test_lost_sources_are_named(root, capsys):
    class Lost(Ext):
        NAME = "tiny_ext"

        def sources(self):
            return ["csrc/nowhere.cpp"]

    with pytest.raises(UnknownOpError, match=r"tiny_ext: .*nowhere.cpp does not exist"):
        Lost(root).open()
    assert not Lost(root).is_compatible(verbose=True)
    assert "nowhere.cpp does not exist" in capsys.readouterr().err


# Exports ------------------------------------------------------------------------------------------


def test_exports_are_read_off_the_sources():
    text = """
    // m.def("commented", &x);  /* m.def("too", &x); */
    const char* quoted = "m.def(\\"quoted\\", &x)";
    void other(py::module& k) { k.def("of_another_module", &x); }
    PYBIND11_MODULE(
        TORCH_EXTENSION_NAME, mod) {
      mod.doc() = "text with // in it";
      mod.def("one", &one, "with (parentheses)");
      mod
        .def(
          "two", [](at::Tensor x) { return x; });
      mod.attr("__version__") = "1";
      mod.attr("LIMIT") = 3;
      py::class_<Foo, std::shared_ptr<Foo>>(mod, "Foo").def("method", &Foo::method);
      py::enum_<Kind> kind(mod, "Kind");
      py::register_exception<Error>(mod, "Error");
    }
    """
    found = read_exports(["int unrelated;", text])
    assert found.module == "TORCH_EXTENSION_NAME"
    assert found.functions == ("one", "two")
    assert found.values == ("Error", "Foo", "Kind", "LIMIT")


def test_exports_may_be_given(root):
    assert Ext(root).exports()[1:] == (("answer",), ("Number",))

    class Given(Ext):
        NAME = "tiny_ext"
        EXPORTS = ("Number", "from_a_macro")

    assert Given(root).exports()[1:] == (("from_a_macro",), ("Number",))


# Loading ------------------------------------------------------------------------------------------


def test_loader_builds_on_the_first_call_only(root, compilations, monkeypatch):
    module = loader_module(Ext(root))
    assert type(module) is types.ModuleType
    assert module.__all__ == ["Number", "answer"]
    assert {"Number", "answer"} <= set(dir(module))
    assert hasattr(module, "answer")
    assert hasattr(module, "Number")
    assert not hasattr(module, "nothing")
    assert type(module.answer) is types.FunctionType
    assert "tiny_ext.cpp" in str(inspect.getdoc(module.answer))
    assert not hasattr(module.Number, "__wrapped__")
    assert "not built yet" in repr(module.Number)
    assert compilations() == 0
    early, number = module.answer, module.Number
    assert module.answer() == 42
    assert compilations() == 1
    assert early() == 42
    assert isinstance(3, number)
    assert number("17") == 17
    assert number.from_bytes(b"\1", "big") == 1
    assert module.Number is int  # the extension's own from now on
    assert module.answer is sys.modules["apex_te.tiny_ext"].answer
    assert compilations() == 1


def test_found_library_needs_no_program(root, cache_dir):
    Ext(root).open()
    code = f"""
import sys
sys.path[:0] = {[str(CHECKOUT), str(CHECKOUT / "tests"), str(Path(__file__).parent)]}
import torch, apex_te
from test_build_pybind11 import Ext
started = []
names = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.system")
sys.addaudithook(lambda event, args: started.append(event) if event in names else None)
module = Ext({str(root)!r}).load()
print(module.answer(), module.__spec__.name, started, "setuptools" in sys.modules)
"""
    done = captured([sys.executable, "-B", "-c", code], check=False, env={**os.environ, "PATH": ""})
    assert done.stdout == "42 apex_te.tiny_ext [] False\n", done.stderr


def test_threads_race_for_one_build(root, compilations):
    module = loader_module(Ext(root))
    start, found = threading.Barrier(8), []

    def call():
        start.wait()
        found.append(module.answer())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [42] * 8
    assert compilations() == 1


def test_failing_build_is_tried_once(root, compilations):
    write(root, SOURCE.replace("VALUE", "MISSING"))
    module = loader_module(Ext(root))
    messages = set()
    for _ in range(3):
        with pytest.raises(CompileError, match=r"MISSING.* was not declared") as error:
            module.answer()
        messages.add(str(error.value))
        assert hasattr(module, "answer")
        assert "answer" in dir(module)
    assert compilations() == 1
    assert len(messages) == 1


def test_load_is_one_module(root):
    module = Ext(root).load()
    assert Ext(root).load() is module is sys.modules["apex_te.tiny_ext"]
    assert isinstance(module.__loader__, importlib.machinery.ExtensionFileLoader)
    again = Ext(root).jit_load()
    assert again is not module
    assert Ext(root).load() is again is sys.modules["apex_te.tiny_ext"]


def test_wrong_names(root, tmp_path):
    class Taken(Ext):
        NAME = "taken_ext"

        def absolute_name(self):
            return "apex_te.optimizers"

    with pytest.raises(ImportError, match=r"apex_te.optimizers is another module already \(.*opt"):
        Taken(root).load()
    Ext(root).load()
    elsewhere = write(tmp_path / "elsewhere")
    with pytest.raises(DuplicateOpError, match=r"tiny_ext.*project.*elsewhere"):
        service.load_extension(Ext(elsewhere))


def test_library_that_does_not_import(root, tmp_path):
    write(root, SOURCE.replace("TORCH_EXTENSION_NAME", "other"))
    with pytest.raises(ImportError, match=r"tiny_ext: .*PyInit_tiny_ext.*cannot be imported"):
        Ext(root).load()
    undefined = "long lost(); static PyObject* answer(PyObject*, PyObject*) {"
    text = SOURCE.replace("static PyObject* answer(PyObject*, PyObject*) {", undefined)
    write(root, text.replace("VALUE", "lost()"))
    with pytest.raises(ImportError, match=r"undefined symbol: .*libraries_args\(\)"):
        Ext(root).jit_load()
    assert "apex_te.tiny_ext" not in sys.modules


def test_export_that_is_not_there(root):
    class Given(Ext):
        NAME = "tiny_ext"
        EXPORTS = ("answer", "lost")

    module = loader_module(Given(root))
    with pytest.raises(AttributeError, match="tiny_ext: its sources export no 'lost'"):
        module.lost()
    assert module.answer() == 42


def test_disabled_jit(root, monkeypatch):
    monkeypatch.setenv("APEX_TE_DISABLE_JIT", "1")
    with pytest.raises(BuildError, match="APEX_BUILD_TINY_EXT=1"):
        loader_module(Ext(root)).answer()

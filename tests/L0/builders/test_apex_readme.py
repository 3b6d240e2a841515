"""The commands and tables of ROCm/apex's README, restated, in its order: each runs here.

What is compiled is not the matter: a stand-in copies one small library to every output. Uninstall
and make clean, which leave nothing, are in test_build_uninstall.py.
"""

import importlib.util
import sys
import zipfile

import new_op
import pytest
from apex_te.compatibility import apex
from apex_te.compatibility.apex import _finder
from apex_te.op_builder import CPUOpBuilder, CUDAOpBuilder, OpBuilder, all_builders, apex_names
from apex_te.op_builder import builder as builders
from apex_te.op_builder.jit.build import service
from apex_te.op_builder.jit.prebuild import install
from programs import captured
from test_build_generate import EXTENSION
from test_build_pybind11 import STAND_IN
from test_build_wheel import make_wheel
from tiny_op import CHECKOUT

from apex_te import op_builder
from apex_te.integrations.apex import op_builder as apex_builders
from apex_te.integrations.apex.op_builder.all_ops import ALL_OPS

# extension, what follows APEX_BUILD_, install option
TABLE = """
amp_C AMP_C CUDA
apex_C APEX_C CPP
bnp BNP CUDA
distributed_adam_cuda DISTRIBUTED_ADAM CUDA
distributed_lamb_cuda DISTRIBUTED_LAMB CUDA
fast_multihead_attn FAST_MULTIHEAD_ATTN CUDA
focal_loss_cuda FOCAL_LOSS CUDA
fused_adam_cuda FUSED_ADAM CUDA
fused_bias_swiglu FUSED_BIAS_SWIGLU CUDA
fused_conv_bias_relu FUSED_CONV_BIAS_RELU CUDA
fused_dense_cuda FUSED_DENSE CUDA
fused_index_mul_2d FUSED_INDEX_MUL_2D CUDA
fused_lamb_cuda FUSED_LAMB CUDA
fused_layer_norm_cuda FUSED_LAYER_NORM CUDA
fused_rotary_positional_embedding FUSED_ROPE CUDA
fused_weight_gradient_mlp_cuda FUSED_WEIGHT_GRADIENT_MLP CUDA
generic_scaled_masked_softmax_cuda GENERIC_SCALED_MASKED_SOFTMAX_CUDA CUDA
mlp_cuda MLP CUDA
_apex_nccl_allocator NCCL_ALLOCATOR CUDA
nccl_p2p_cuda NCCL_P2P CUDA
peer_memory_cuda PEER_MEMORY CUDA
scaled_masked_softmax_cuda SCALED_MASKED_SOFTMAX_CUDA CUDA
scaled_softmax_cuda SCALED_SOFTMAX_CUDA CUDA
scaled_upper_triang_masked_softmax_cuda SCALED_UPPER_TRIANG_MASKED_SOFTMAX_CUDA CUDA
syncbn SYNCBN CUDA
transducer_joint_cuda TRANSDUCER_JOINT CUDA
transducer_loss_cuda TRANSDUCER_LOSS CUDA
xentropy_cuda XENTROPY CUDA
"""
ROWS = [line.split() for line in TABLE.strip().splitlines()]


# Installation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "variable", "group"), ROWS)
def test_table_of_extensions(module, variable, group, monkeypatch):
    """Every extension has a builder with the variable and the option of its row."""
    builder = ALL_OPS[module]
    assert isinstance(builder, OpBuilder)
    assert (builder.NAME, builder.name) == (module, module)
    assert f"APEX_BUILD_{variable}" == builder.BUILD_VAR
    assert f"APEX_BUILD_{group}_OPS" == builder.INCLUDE_FLAG
    assert getattr(apex_builders, type(builder).__name__) is type(builder)
    if apex_names.served_by(module) is None:
        assert not builder.is_compatible()
        with pytest.raises(NotImplementedError, match=rf"does not serve {module}.*docs/apex.md"):
            builder.load()
        return
    assert builder.is_compatible(verbose=True)
    assert all((CHECKOUT / source).is_file() for source in builder.sources())
    loaded = []
    monkeypatch.setattr(OpBuilder, "load", lambda self, verbose: loaded.append(self.NAME))
    module_of = builder._load(verbose=False, force=False)
    assert module_of.__name__ == builder.absolute_name()
    assert loaded == list(builder.ops())


def test_builders_of_all_extensions():
    assert sorted(ALL_OPS) == sorted(module for module, _, _ in ROWS)
    assert set(apex_builders.__all__) >= {type(builder).__name__ for builder in ALL_OPS.values()}
    assert apex_builders.RopeBuilder is type(all_builders()["rope"])
    with pytest.raises(AttributeError, match="no attribute 'NothingBuilder'"):
        _ = apex_builders.NothingBuilder


@pytest.mark.parametrize(
    "line",
    [
        "APEX_BUILD_FUSED_DENSE=1",
        # pip install . --no-build-isolation: nothing is built, as in test_wheel_holds_every_source
        pytest.param("", marks=pytest.mark.long),
        pytest.param("APEX_BUILD_CPU_OPS=1", marks=pytest.mark.long),
        pytest.param("APEX_BUILD_MLP=1", marks=pytest.mark.long),
    ],
)
def test_install_lines(line, checkout, fake_compiler, tmp_path):
    """``<variables> pip install .``, whose wheel the same backend makes."""
    if "FUSED_DENSE" in line and install.cuda_expected():
        pytest.skip("would compile for GPUs, too")
    variables = dict(word.split("=") for word in line.split())
    wheel, output = make_wheel(checkout, tmp_path / "wheel", CXX=fake_compiler, **variables)
    names = zipfile.ZipFile(wheel).namelist()
    libraries = {name.split("/")[-1] for name in names if name.endswith("_cpu.so")}
    libraries.discard("apex_te_jax_cpu.so")
    if "FUSED_DENSE" in line:
        assert libraries == {"activation_cpu.so", "bias_gelu_cpu.so"}
    elif "CPU_OPS" in line:
        assert len(libraries) == len([b for b in all_builders().values() if "cpu" in b.DEVICES])
    else:
        assert libraries == set()
    if "MLP" in line:
        assert "APEX_BUILD_MLP: mlp_cuda runs on PyTorch and needs no library" in output


def test_all_extensions_are_prebuilt_by_both_options(monkeypatch):
    for group in ("CPP", "CUDA"):
        monkeypatch.setenv(f"APEX_BUILD_{group}_OPS", "1")
    choices = install.check_install(all_builders())
    wanted = {(each.op, each.device) for each in choices if each.wanted}
    every = {(name, device) for name, b in all_builders().items() for device in b.DEVICES}
    assert wanted == every


# A new module -------------------------------------------------------------------------------------


def test_jit_module_of_the_example(tree, monkeypatch, capsys):
    """python scripts/jit_module.py fused_bias_swiglu, its two questions and their answers."""
    folder = tree / "csrc" / "megatron"
    folder.mkdir()
    (folder / "fused_bias_swiglu.cpp").write_text(EXTENSION)
    (folder / "fused_bias_swiglu_cuda.cu").write_text("")
    (folder / "fused_bias_swiglu.h").write_text("")
    given = ["fused_bias_swiglu.cpp", "fused_bias_swiglu.h", "fused_bias_swiglu_cuda.cu"]
    answers = iter(["y", ",".join(f"csrc/megatron/{name}" for name in given)])
    monkeypatch.setattr("builtins.input", lambda prompt: print(prompt) or next(answers))
    assert new_op.main(["fused_bias_swiglu"]) == 0
    out = capsys.readouterr().out
    assert "Is this a CUDA module? (Y/n)" in out
    assert "Enter the sources (comma separated)" in out
    builder = (tree / "op_builder" / "fused_bias_swiglu.py").read_text()
    assert "class FusedBiasSwigluBuilder(CUDAOpBuilder)" in builder
    assert 'return ["csrc/megatron"]' in builder  # include_paths


@pytest.mark.parametrize("answer", ["", "Y", "n"])
def test_jit_module_asks_for_the_name(answer, tree, monkeypatch, capsys):
    """Without sources, which may be skipped, it writes an op to change."""
    answers = iter(["my_module", answer, ""])
    monkeypatch.setattr("builtins.input", lambda prompt: print(prompt) or next(answers))
    assert new_op.main([]) == 0
    assert "What is the name of the module?" in capsys.readouterr().out
    base = "CPUOpBuilder" if answer == "n" else "CUDAOpBuilder"
    assert f"({base})" in (tree / "op_builder" / "my_module.py").read_text()


def test_jit_module_is_a_program(tmp_path):
    script = str(CHECKOUT / "scripts" / "jit_module.py")
    done = captured([sys.executable, script, "my_module", "--yes", "--dry-run"], cwd=tmp_path)
    assert "  op_builder/my_module.py\n" in done.stdout


# A builder of apex, with what its tables of attributes and methods name, in a file of another name.
BUILDER = """
from .builder import CUDAOpBuilder


class TinyThingBuilder(CUDAOpBuilder):
    BUILD_VAR = "APEX_BUILD_TINY_THING"
    INCLUDE_FLAG = "APEX_BUILD_CPU_OPS"
    NAME = "tiny_ext"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return f"apex.{self.NAME}"

    def sources(self):
        return ["csrc/thing/tiny.cpp", "csrc/thing/stand_in.h"]

    def include_paths(self):
        return ["csrc/", "csrc/thing"]

    def cxx_args(self):
        args = super().cxx_args()
        return args + ["-std=c++17", "-DVALUE=44"] + self.version_dependent_macros()

    def nvcc_args(self):
        flags = ["-O3", "--use_fast_math"] + self.version_dependent_macros()
        flags += self.generator_args() + self.aten_atomic_args() + self.backward_pass_guard_args()
        if self.is_rocm_pytorch() and self.installed_rocm_version() >= (6, 0):
            flags.append("-DROCM")
        else:
            flags.extend(self.nvcc_threads_args() + self.compute_capability_args())
        return self.strip_empty_entries(flags)

    def is_compatible(self, verbose=True):
        if self.torch_version() < (1, 5):
            self.warning("torch is too old")
            return False
        return COMPATIBLE

    def libraries_args(self):
        return ["m"]
"""
SOURCE = """
#include "stand_in.h"
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(VALUE); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("answer", answer); }
"""


@pytest.fixture
def their_builder(tmp_path, monkeypatch):
    """The builder's class, from a file among the suite's builders."""
    monkeypatch.setattr(service, "_extensions", {})
    monkeypatch.setattr(builders, "registered", {})

    def make(compatible):
        folder = tmp_path / "csrc" / "thing"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tiny.cpp").write_text(SOURCE)
        (folder / "stand_in.h").write_text(STAND_IN)
        (tmp_path / "thing_file.py").write_text(BUILDER.replace("COMPATIBLE", compatible))
        monkeypatch.setattr(op_builder, "_suite", {})
        monkeypatch.setattr(op_builder, "__path__", [*op_builder.__path__, str(tmp_path)])
        with monkeypatch.context() as patch:
            for module in (op_builder, builders):
                patch.setattr(module, "added", lambda: {"tiny_ext": "thing_file"})
            return type(op_builder.get_builder("tiny_ext"))

    yield make
    sys.modules.pop("apex.tiny_ext", None)
    sys.modules.pop("apex_te.op_builder.thing_file", None)


def test_attributes_and_methods_of_a_builder(their_builder, tmp_path):
    """NAME need not be the file's; headers are no sources; libraries are named without -l."""
    cls = their_builder("True")
    cls.ROOT = tmp_path
    builder = cls()
    assert (builder.name, builder.BINDING) == ("tiny_ext", "pybind11")
    assert (builder.jit_mode, builder.build_for_cpu, builder.enable_bf16) == (False,) * 3
    assert builder.error_log is None
    flags = builder.compile_flags("cpu")
    assert "-std=c++20" in flags
    assert "-std=c++17" not in flags
    assert "-lm" in builder.key_flags("cpu")
    assert "--use_fast_math" in builder.nvcc_args()
    assert builder.load().answer() == 44


def test_incompatible_builder_is_not_loaded(their_builder, tmp_path, capsys):
    cls = their_builder("False")
    cls.ROOT = tmp_path
    builder = cls()
    builder.warning("needs a newer machine")
    assert "tiny_ext: needs a newer machine" in capsys.readouterr().err
    with pytest.raises(op_builder.BuildError, match=r"is_compatible\(\) is False: needs a newer"):
        builder.load()


def test_file_names_of_builders_need_not_be_their_names(tmp_path, monkeypatch):
    (tmp_path / "thing_file.py").write_text(BUILDER)
    (tmp_path / "other.py").write_text("")
    monkeypatch.setattr(builders, "__file__", str(tmp_path / "builder.py"))
    assert builders.added() == {"tiny_ext": "thing_file", "other": "other"}
    assert "tiny_ext" in op_builder.builder_names()


def test_added_op_is_imported_at_top_level(their_builder, monkeypatch):
    """As the README's ``import fused_bias_swiglu``, once the extensions' names are installed."""
    their_builder("True")
    monkeypatch.setattr(_finder, "added", lambda: {"tiny_ext": "thing_file"})
    monkeypatch.setattr(op_builder, "builder_names", lambda: ["tiny_ext"])
    assert importlib.util.find_spec("tiny_ext") is None
    apex.install()
    try:
        spec = importlib.util.find_spec("tiny_ext")
        assert spec.origin.endswith("thing_file.py")
    finally:
        apex.uninstall()


MEMBERS = """
absolute_name sources include_paths cxx_args nvcc_args extra_ldflags libraries_args is_compatible
load jit_load builder is_rocm_pytorch is_sycl_enabled installed_rocm_version get_rocm_gpu_arch
get_rocm_wavefront_size validate_torch_version validate_torch_op_version has_function command_exists
warning strip_empty_entries apex_src_path cpu_arch simd_width get_cuda_compile_flag hipify_extension
sycl_extension compute_capability_args filter_ccs version_dependent_macros generator_args
aten_atomic_args backward_pass_guard_args nvcc_threads_args nccl_args nccl_version torch_version
is_supported get_cuda_lib64_path
"""


@pytest.mark.parametrize("base", [OpBuilder, CUDAOpBuilder, CPUOpBuilder])
def test_members_of_the_base_classes(base):
    assert [name for name in MEMBERS.split() if not callable(getattr(base, name, None))] == []


def test_what_the_members_answer(monkeypatch, tmp_path):
    builder = all_builders()["rope"]
    monkeypatch.setenv("APEX_TE_GPU_PLATFORM", "cuda")
    assert builder.is_rocm_pytorch() is builder.is_sycl_enabled() is False
    assert builder.get_rocm_gpu_arch() == builder.get_rocm_wavefront_size() == ""
    assert builder.torch_version() >= (2, 10)
    assert builder.has_function("cos", ["m"])
    assert not builder.has_function("there_is_no_such_function", ["m"])
    assert not builder.has_function("cos", ["no_such_library"], [str(tmp_path)], verbose=True)
    assert builder.command_exists("sh")
    assert not builder.command_exists("no-such-program")
    assert builder.strip_empty_entries(["", "-O3"]) == ["-O3"]
    assert builder.apex_src_path("csrc/x.cpp") == str(CHECKOUT / "csrc/x.cpp")
    assert builder.filter_ccs(["8.0"]) == ["8.0"]
    assert builder.is_supported() == builder.is_compatible()
    assert builder.hipify_extension() is builder.sycl_extension() is None
    major, minor = builder.torch_version()
    builder.validate_torch_version({"version": f"{major}.{minor}.7"})
    with pytest.raises(RuntimeError, match=r"torch's version must be 1\.5, as in the build, got 2"):
        builder.validate_torch_op_version({"version": "1.5"})

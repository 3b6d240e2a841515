"""AMD GPUs: the platform, archs, translated copies, keys, and libraries that hipcc makes."""

import hashlib
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from programs import captured
from tiny_op import CHECKOUT, TinyCuda, write_op

from op_builder import all_builders
from op_builder.jit import platform
from op_builder.jit.backends import archs, hipify, library, toolchain
from op_builder.jit.backends.archs import Arch, choose, parse_arch, parse_arch_list
from op_builder.jit.errors import ArchError, BuildError, HipccNotFoundError, SettingError
from op_builder.jit.sources import closure

GFX90A, GFX942 = (9, 0, 10), (9, 4, 2)
KERNEL = """
#include <cuda_runtime.h>
#include "common/value.h"
__global__ void add(float* p) {
  p[threadIdx.x] = VALUE + __shfl_xor_sync(0xFFFFFFFFu, p[threadIdx.x], 16);
}
extern "C" __attribute__((visibility("default"))) int tiny(float* p, cudaStream_t stream) {
  add<<<1, 32, 0, stream>>>(p);
  return cudaGetLastError() == cudaSuccess;
}
"""


@pytest.fixture
def amd(monkeypatch):
    """GPU code is for AMD."""
    for name in ("PYTORCH_ROCM_ARCH", "ROCM_HOME", "ROCM_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("APEX_TE_GPU_PLATFORM", "hip")


# Platform ------------------------------------------------------------------------------------


def test_platform_is_named_or_torchs(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(hip=None)))
    assert not platform.is_hip()
    monkeypatch.setenv("APEX_TE_GPU_PLATFORM", "HIP")
    assert platform.is_hip()
    rocm = SimpleNamespace(version=SimpleNamespace(hip="6.2.41133-dd7f95766"))
    monkeypatch.setitem(sys.modules, "torch", rocm)
    monkeypatch.setenv("APEX_TE_GPU_PLATFORM", "cuda")
    assert not platform.is_hip()
    monkeypatch.delenv("APEX_TE_GPU_PLATFORM")
    assert platform.is_hip()
    assert library.runtime_major() == "6"


def test_platform_of_a_wrong_name(monkeypatch):
    monkeypatch.setenv("APEX_TE_GPU_PLATFORM", "rocm")
    with pytest.raises(SettingError, match='GPU_PLATFORM must be "cuda" or "hip", got \'rocm\''):
        platform.is_hip()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hip: Optional[str] = '6.2.41133-dd7f95766'", "True 6"),
        ('hip = "5.7.31921"', "True 5"),
        ("hip: Optional[str] = None", "False"),
    ],
)
def test_platform_is_read_off_torch_without_importing_it(tmp_path, line, expected):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "version.py").write_text(f"__version__ = '2.9.0'\ncuda = None\n{line}\n")
    code = (
        "from op_builder.jit import platform\n"
        "from op_builder.jit.backends import library\n"
        "active = platform.is_hip()\n"
        "print(active, *([library.runtime_major()] if active else []))"
    )
    done = captured(
        [sys.executable, "-B", "-c", code],
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{CHECKOUT}"},
    )
    assert (done.stdout.strip(), done.stderr) == (expected, "")


# Archs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gfx942;gfx90a", ["gfx90a", "gfx942"]),
        ("gfx90a:sramecc+:xnack- gfx90a", ["gfx90a"]),
        ("GFX1100, gfx906", ["gfx906", "gfx1100"]),
        ("native", ["gfx90a"]),
    ],
)
def test_parse(amd, text, expected):
    found = parse_arch_list(text, lambda: [GFX90A])
    assert [str(arch) for arch in found] == [arch.number for arch in found] == expected


@pytest.mark.parametrize(
    "text", ["9.0", "gfx90a 9.0", "native+PTX", "gfx9-generic", "mi300", "gfx90a:xnack"]
)
def test_parse_refuses(amd, text):
    with pytest.raises(ArchError, match="example: APEX_TE_ROCM_ARCH="):
        parse_arch_list(text)


def test_cuda_takes_no_amd_arch():
    with pytest.raises(ArchError, match="gfx90a must be a CUDA arch, got one of ROCm"):
        parse_arch_list("gfx90a")


def test_coverage_is_exact():
    arch = parse_arch("gfx90a")
    assert arch == Arch(*GFX90A)
    assert arch.covers(GFX90A)
    assert not arch.covers(GFX942)
    assert not arch.covers((9, 0))
    assert not Arch(9, 0, ptx=True).covers(GFX90A)


def test_choice_order(amd, monkeypatch, tmp_path):
    monkeypatch.setattr(archs, "initialised_capabilities", list)
    monkeypatch.setattr(archs, "KFD_NODES", str(tmp_path))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")  # nothing to an AMD GPU
    with pytest.raises(ArchError, match="no GPU is visible to choose a ROCm arch from"):
        choose("op", (8, 0), [], None)
    for node, version in enumerate((0, 90010, 90402, 90402)):
        (tmp_path / str(node)).mkdir()
        text = f"cpu_cores_count 0\ngfx_target_version {version}\nvendor_id 4098\n"
        (tmp_path / str(node) / "properties").write_text(text)
    assert [str(arch) for arch in choose("op", (8, 0), [], None)] == ["gfx90a", "gfx942"]
    assert choose("op", (8, 0), [], GFX942) == (Arch(*GFX942),)
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx906")
    assert [str(arch) for arch in choose("op", (8, 0), [(9, 0)], None)] == ["gfx906"]
    monkeypatch.setenv("APEX_TE_ROCM_ARCH", "gfx90a")
    assert [str(arch) for arch in choose("op", (8, 0), [], None)] == ["gfx90a"]
    with pytest.raises(ArchError, match="'gfx90a' does not cover the device of arch gfx942"):
        choose("op", (8, 0), [], GFX942)


def test_a_devices_arch_is_torchs_name_for_it(monkeypatch):
    import torch

    named = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.2.41133")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: named)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 4))
    assert archs.device_capability(0) == GFX942
    monkeypatch.setattr(torch.version, "hip", None)
    assert archs.device_capability(0) == (9, 4)


# Translation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#include <cuda_runtime.h>", "#include <hip/hip_runtime.h>"),
        ('  # include "cublasLt.h"', '  # include "hipblaslt/hipblaslt.h"'),
        ('#include "common/norm/cuda.h"', '#include "common/norm/cuda.h"'),
        ("check_cuda(cudaGetLastError())", "check_cuda(hipGetLastError())"),
        ("cudaDevAttrMultiProcessorCount", "hipDeviceAttributeMultiprocessorCount"),
        ("cudaDataType_t t = CUDA_R_16BF;", "hipDataType t = HIP_R_16BF;"),
        ("cublasLtMatmul(CUBLAS_OP_T)", "hipblasLtMatmul(HIPBLAS_OP_T)"),
        ("CUBLASLT_EPILOGUE_BIAS", "HIPBLASLT_EPILOGUE_BIAS"),
        ('"libcublasLt.so", my_cudaThing', '"libcublasLt.so", my_cudaThing'),
        ("__shfl_xor_sync(m, v, 1)", "apex_te_shfl_xor(m, v, 1)"),
        ("defined(__CUDACC__) && __CUDA_ARCH__", "defined(__HIPCC__) && __CUDA_ARCH__"),
    ],
)
def test_translation(text, expected):
    assert hipify.translate(text) == expected
    assert hipify.translate(expected) == expected


def test_a_changed_mapping_is_another_key(monkeypatch):
    before = hipify.digest()
    hipify.digest.cache_clear()
    assert hipify.digest() == before
    monkeypatch.setitem(hipify.NAMES, "cudaThing", "hipThing")
    hipify.digest.cache_clear()
    assert hipify.digest() != before
    hipify.digest.cache_clear()


def test_copies_leave_the_tree_alone(tmp_path):
    builder = all_builders()["rms_norm"]
    sources = [str(builder.root / name) for name in builder.device_sources("cuda")]
    read = closure(sources, builder.include_folders())
    names = {path: sorted(os.listdir(os.path.dirname(path))) for path in read}
    hipify.copies(sources, builder.include_folders(), str(tmp_path))
    for path, digest in read.items():
        assert hashlib.sha256(Path(path).read_bytes()).digest() == digest
        assert sorted(os.listdir(os.path.dirname(path))) == names[path]
        text = Path(hipify.copied(path, str(tmp_path))).read_text()
        assert "cudaStream_t" not in text
        assert "__shfl_xor_sync" not in text
    made = {str(path) for path in tmp_path.rglob("*") if path.is_file()}
    assert made == {hipify.copied(path, str(tmp_path)) for path in read}


# Keys ----------------------------------------------------------------------------------------


def test_keys_of_the_platforms_differ(root, monkeypatch, tmp_path):
    builder = TinyCuda(root)
    cuda, cpu = builder.key("cuda"), builder.key("cpu")
    monkeypatch.setenv("APEX_TE_GPU_PLATFORM", "hip")
    keys = set()
    for version in ("5.7.1", "6.2.0", "6.4.3"):
        torch = SimpleNamespace(version=SimpleNamespace(hip=version))
        monkeypatch.setitem(sys.modules, "torch", torch)
        keys.add(builder.key("cuda"))
    assert len(keys) == 2  # the runtime's major version
    assert cuda not in keys
    assert builder.key("cpu") == cpu


# Building ------------------------------------------------------------------------------------


@pytest.fixture
def fake_hipcc(tmp_path, monkeypatch):
    """A hipcc that notes its arguments and leaves what is HIP's out for g++."""
    log = tmp_path / "hipcc.log"
    home = tmp_path / "rocm"
    (home / "bin").mkdir(parents=True)
    script = home / "bin" / "hipcc"
    script.write_text(
        f"""#!{sys.executable}
import os, sys
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("HIP version: 6.2.41133\\nAMD clang version 18.0.0")
    sys.exit()
with open({str(log)!r}, "a") as file:
    print(os.environ.get("HIP_PLATFORM"), *arguments, file=file)
kept, skip = [], False
for argument in arguments:
    if argument == "-include":
        skip = True
    elif skip:
        skip = False
    elif argument == "-xhip":
        kept += ["-x", "c++"]
    elif not argument.startswith(("--offload-arch", "-fhip", "-Wno-")):
        kept.append(argument)
os.execvp("g++", ["g++", *kept])
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("APEX_TE_ROCM_HOME", str(home))
    toolchain._output.cache_clear()
    return log


def test_build_and_look_up(amd, fake_hipcc, root, monkeypatch):
    monkeypatch.setenv("APEX_TE_ROCM_ARCH", "gfx90a;gfx1100")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    builder = TinyCuda(root)
    opened = builder.open("cuda", GFX90A)
    assert opened.archs == ("gfx90a", "gfx1100")
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    compiled, linked = fake_hipcc.read_text().splitlines()
    for line in (compiled, linked):
        assert line.startswith("amd ")
        assert "--offload-arch=gfx90a --offload-arch=gfx1100" in line
    assert "-ffp-contract=off" in compiled
    assert f"-c {root}" not in compiled  # but a copy
    assert builder.compiler_version("cuda", []) == "hipcc 6.2.41133, clang 18.0.0"

    for capability in (GFX90A, (11, 0, 0)):
        found = builder.find("cuda", capability)
        assert found is not None
        assert found.path == opened.path
    assert builder.find("cuda", GFX942) is None
    with pytest.raises(ArchError, match="does not cover the device of arch gfx942"):
        builder.open("cuda", GFX942)
    monkeypatch.setenv("APEX_TE_GPU_PLATFORM", "cuda")
    assert builder.find("cuda", (9, 0)) is None


def test_without_hipcc(amd, root, monkeypatch):
    monkeypatch.setenv("APEX_TE_ROCM_HOME", str(root))
    with pytest.raises(HipccNotFoundError, match=f"APEX_TE_ROCM_HOME={root} holds no bin/hipcc"):
        TinyCuda(root).open("cuda", GFX90A)
    monkeypatch.delenv("APEX_TE_ROCM_HOME")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(toolchain.glob, "glob", lambda pattern: [])
    if not os.path.exists("/opt/rocm/bin/hipcc"):
        with pytest.raises(HipccNotFoundError, match=r"no hipcc found.*APEX_TE_ROCM_HOME"):
            TinyCuda(root).open("cuda", GFX90A)


def test_torch_extensions_are_refused(amd, root):
    builder = TinyCuda(root)
    builder.BINDING = "pybind11"  # type: ignore[misc]
    with pytest.raises(BuildError, match="cannot be built for AMD"):
        library.build_steps(builder, "cpu", [Arch(*GFX90A)], str(root), "out.so")


def test_check_hip_without_hipcc(tmp_path):
    if os.path.exists("/opt/rocm"):
        pytest.skip("/opt/rocm is looked at whatever the environment says")
    done = captured(
        [sys.executable, str(CHECKOUT / "scripts" / "check_hip.py")],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(CHECKOUT)},
    )
    assert "check_hip: NOT CHECKED, no source was compiled for AMD GPUs" in done.stdout


@pytest.mark.skipif(shutil.which("hipcc") is None, reason="needs hipcc")
@pytest.mark.parametrize(("arch", "lanes"), [("gfx90a", 64), ("gfx1030", 32)])
def test_hipcc(amd, root, monkeypatch, arch, lanes):
    """The real compiler, for a wave of 64 and one of 32; what it makes needs no GPU to be found."""
    write_op(root)
    check = f'static_assert(APEX_TE_WAVE_SIZE == {lanes}, "");'
    check = f"#if defined(__HIP_DEVICE_COMPILE__)\n{check}\n#endif\n"
    (root / "csrc" / "common" / "gpu").mkdir()
    shutil.copy(CHECKOUT / "csrc/common/gpu/compat.h", root / "csrc/common/gpu/compat.h")
    source = root / "csrc" / "tiny" / "tiny_cuda.cu"
    source.write_text(f'#include "common/gpu/compat.h"\n{check}{KERNEL}')
    monkeypatch.setenv("APEX_TE_ROCM_ARCH", arch)
    opened = TinyCuda(root).open("cuda", None)
    assert opened.archs == (arch,)
    content = Path(opened.path).read_bytes()
    assert f"hipv4-amdgcn-amd-amdhsa--{arch}".encode() in content
    assert b"libamdhip64.so" in content

"""Members that builders written for ROCm's apex expect of their base classes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from .jit.backends import pybind, toolchain
from .jit.platform import installed_torch, is_hip, own_cpu_features, text_of, torch_hip_version
from .jit.text import tell


def _version(text: str | None) -> tuple[int, int]:
    """Returns major and minor of a version's text, (0, 0) for None."""
    found = re.match(r"(\d+)(?:\.(\d+))?", text or "")
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


def _always(*flags: str) -> Any:
    """Returns a method that returns the same flags whatever it is given."""
    return staticmethod(lambda *_: list(flags))


class ApexMembers:
    """Mixin of ``OpBuilder``: members of apex's builders beyond those that declare an op."""

    NAME: ClassVar[str]
    root: Path
    jit_mode = build_for_cpu = enable_bf16 = False
    error_log: str | None = None  # text of the last ``warning``, which an error of ``load`` repeats

    # Flags that the op adds to the linker's, beside ``libraries_args``.
    extra_ldflags = _always()
    # By these apex's sources know a torch of at least 1.5, and its header of atomic operations.
    version_dependent_macros = _always(*(f"-DVERSION_GE_1_{minor}" for minor in (1, 3, 5)))
    aten_atomic_args = _always("-DATEN_ATOMIC_HEADER")
    nccl_args = _always("-lnccl")
    # A build adds archs and compiler processes by itself, and torch has had the new header of its
    # random generator since 1.8.
    compute_capability_args = nvcc_threads_args = generator_args = _always()

    @staticmethod
    def backward_pass_guard_args() -> list[str]:
        """Returns macros that name the guard of backward passes in torch's headers, if any."""
        text = text_of(os.path.join(installed_torch().path or "", "include/ATen/Context.h"))
        for name in ("ROCmBackwardPassGuard", "BackwardPassGuard"):
            if name in text:
                return ["-DBACKWARD_PASS_GUARD", f"-DBACKWARD_PASS_GUARD_CLASS={name}"]
        return []

    @staticmethod
    def filter_ccs(ccs: Sequence[str]) -> list[str]:
        """Returns the given compute capabilities; a subclass may leave some out."""
        return list(ccs)

    @staticmethod
    def cpu_arch() -> str:
        """Returns the flag for the CPU of this machine alone, which a wheel's build refuses."""
        return "-march=native"

    @staticmethod
    def simd_width() -> str:
        """Returns the macro for the CPU's widest vectors: AVX-512, AVX2 or none."""
        features = own_cpu_features() or frozenset()
        if "avx512f" in features:
            return "-D__AVX512__"
        return "-D__AVX256__" if "avx2" in features else "-D__SCALAR__"

    @staticmethod
    def get_cuda_compile_flag() -> str:
        """Returns the macro that says whether a CUDA toolkit is found."""
        found = shutil.which("nvcc") or os.environ.get("CUDA_HOME")
        return "-D__ENABLE_CUDA__" if found else "-D__DISABLE_CUDA__"

    @staticmethod
    def get_cuda_lib64_path() -> str:
        """Returns the folder of the CUDA toolkit's libraries."""
        return os.path.join(toolchain.find_nvcc().home, "lib64")

    @staticmethod
    def strip_empty_entries(args: Iterable[str]) -> list[str]:
        """Returns the flags without empty ones."""
        return [arg for arg in args if arg]

    def apex_src_path(self, code_path: str) -> str:
        """Returns a path relative to ``root`` as an absolute one."""
        return os.path.join(self.root, code_path)

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Returns True if GPU code is compiled for AMD GPUs."""
        return is_hip()

    @staticmethod
    def is_sycl_enabled() -> bool:
        """Returns False: there is no build for SYCL."""
        return False

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """Returns major and minor of the HIP version that torch was built for, else (0, 0)."""
        return _version(torch_hip_version())

    @staticmethod
    def get_rocm_gpu_arch() -> str:
        """Returns the archs that the environment lists for AMD GPUs, "" for NVIDIA's."""
        return os.environ.get("PYTORCH_ROCM_ARCH", "") if is_hip() else ""

    @staticmethod
    def get_rocm_wavefront_size() -> str:
        """Returns the threads of a wavefront of AMD's data center GPUs, "" for NVIDIA's."""
        return "64" if is_hip() else ""

    @staticmethod
    def torch_version() -> tuple[int, int]:
        """Returns major and minor of the installed torch's version."""
        return _version(installed_torch().version)

    def nccl_version(self) -> tuple[int, int]:
        """Returns major and minor of the version of torch's NCCL, (0, 0) without a GPU."""
        torch = pybind.installed_torch(self.NAME)
        if not torch.cuda.is_available():
            return 0, 0
        major, minor = torch.cuda.nccl.version()[:2]
        return major, minor

    @staticmethod
    def validate_torch_version(torch_info: Mapping[str, str]) -> None:
        """Raises ``RuntimeError`` if torch's versions are not those that a build recorded.

        Args:
            torch_info: "version", "cuda_version" and "hip_version"; "0.0" stands for none.
        """
        torch = installed_torch()
        here = {"version": torch.version, "cuda_version": torch.cuda, "hip_version": torch.hip}
        for name, text in here.items():
            if name in torch_info and _version(torch_info[name]) != _version(text):
                raise RuntimeError(
                    f"torch's {name} must be {torch_info[name]}, as in the build, got {text}"
                )

    validate_torch_op_version = validate_torch_version

    @staticmethod
    def command_exists(cmd: str | Sequence[str]) -> bool:
        """Returns True if ``PATH`` has a program, or one of several."""
        return any(shutil.which(each) for each in ([cmd] if isinstance(cmd, str) else cmd))

    @staticmethod
    def has_function(
        funcname: str,
        libraries: Sequence[str] = (),
        library_dirs: Sequence[str] = (),
        verbose: bool = False,
    ) -> bool:
        """Returns True if a program that calls a C function links; CFLAGS and LDFLAGS count."""
        flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
        linked = [f"-L{folder}" for folder in library_dirs] + [f"-l{each}" for each in libraries]
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(folder, "call.cpp")
            with open(source, "w", encoding="utf-8") as file:
                file.write(f'extern "C" char {funcname}(); int main() {{ return {funcname}(); }}\n')
            command = [*toolchain.find_cxx(), "-fno-builtin", *flags[0], source, *flags[1]]
            done = subprocess.run(
                [*command, "-o", os.path.join(folder, "call"), *linked],
                capture_output=True,
                text=True,
                check=False,
            )
        if verbose and done.stderr:
            tell(done.stderr.rstrip())
        return done.returncode == 0

    def warning(self, msg: str) -> None:
        """Prints a warning about the op, and keeps it as ``error_log``."""
        self.error_log = msg
        tell(f"apex_te: {self.NAME}: {msg}")

    def hipify_extension(self) -> None:
        """Does nothing: a build for AMD GPUs translates its sources, and there is none for SYCL."""

    sycl_extension = hipify_extension

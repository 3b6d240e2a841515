"""What of docs/new_op.md takes a minute: kernels for every arch, an extension that includes torch.

Also a generated CPU op, and an extension with a CUDA source.
"""

import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "L0" / "builders"))
import tutorial

KERNEL = """
#include <cuda_runtime.h>

__global__ void add_one_kernel(float* x, long n) {
  const long i = blockIdx.x * 256L + threadIdx.x;
  if (i < n) x[i] += 1.0f;
}

int add_one_launch(float* x, long n, void* stream) {
  add_one_kernel<<<(n + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(x, n);
  return cudaGetLastError();
}
"""
BINDING = """
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

int add_one_launch(float* x, long n, void* stream);

void add_one(at::Tensor x, intptr_t stream) {
  const int error = add_one_launch(x.data_ptr<float>(), x.numel(), reinterpret_cast<void*>(stream));
  if (error) throw std::runtime_error("add_one: CUDA error " + std::to_string(error));
}

struct Counter {
  int value = 0;
  int next() { return ++value; }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("add_one", &add_one);
  m.attr("version") = 3;
  pybind11::class_<Counter>(m, "Counter").def(pybind11::init<>()).def("next", &Counter::next);
}
"""
USE = """
import torch
from apex_te.compatibility import plus_one
assert plus_one.__all__ == ["Counter", "add_one", "version"]
assert not isinstance(3, plus_one.Counter)      # builds
counter = plus_one.Counter()
assert (counter.next(), counter.next(), plus_one.version) == (1, 2, 3)
if torch.cuda.is_available():
    x = torch.arange(1000.0, device="cuda")
    plus_one.add_one(x, torch.cuda.current_stream().cuda_stream)
    assert torch.equal(x, torch.arange(1, 1001.0, device="cuda"))
else:
    try:
        plus_one.add_one(torch.zeros(3), 0)
    except RuntimeError as error:
        assert "CUDA error" in str(error)       # no driver, or no GPU
print("used")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return tutorial.copy_checkout(tmp_path_factory.mktemp("new_op") / "checkout")


@pytest.fixture
def variables(checkout):
    return tutorial.environment(checkout)


def generate(checkout, variables, *arguments):
    script = str(checkout / "scripts" / "new_op.py")
    tutorial.run([sys.executable, script, *arguments], Path("/"), variables)


def test_cuda_source_for_every_arch(checkout, variables):
    title = "An op of the suite"
    tutorial.follow_commands(title, checkout, variables, "--cuda --yes")
    (output,) = tutorial.follow_commands(title, checkout, variables, "check_cuda.py").values()
    assert "NOT CHECKED" in output or " passed, 0 failed" in output
    generate(checkout, variables, "isru", "--remove", "--force")


def test_cpu_op(checkout, variables):
    generate(checkout, variables, "cpu_only", "--cpu", "--yes")
    command = [sys.executable, "-m", "pytest", "-q", "tests/L0/ops/test_cpu_only.py"]
    output = tutorial.run(command, checkout, variables)
    assert "passed" in output
    assert "skipped" not in output
    tutorial.run([sys.executable, "benchmarks/run.py", "cpu_only"], checkout, variables)
    generate(checkout, variables, "cpu_only", "--remove")


def test_tutorial_of_an_existing_extension(checkout, variables):
    outputs = tutorial.follow("An extension that exists", checkout, variables)
    assert "1 passed" in outputs["python -m pytest tests/L0/ops/test_multi_scale.py"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_extension_with_a_cuda_source(checkout, variables):
    (checkout / "csrc" / "plus_one.cpp").write_text(BINDING)
    (checkout / "csrc" / "plus_one_kernel.cu").write_text(KERNEL)
    generate(
        checkout, variables, "plus_one", "--sources", "csrc/plus_one.cpp,csrc/plus_one_kernel.cu"
    )
    if not torch.cuda.is_available():
        variables["APEX_TE_CUDA_ARCH_LIST"] = "9.0"
    output = tutorial.run([sys.executable, "-c", USE], checkout, variables)
    assert output == "used\n"

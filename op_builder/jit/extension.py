"""Extension modules: importing one from a descriptor, and what one that includes torch needs."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from . import toolchain
from .cache import OpenedLibrary


def soabi() -> str:
    """The interpreter's SOABI, read off the suffix of its extension modules."""
    return importlib.machinery.EXTENSION_SUFFIXES[0]


def import_module(name: str, opened: OpenedLibrary) -> ModuleType:
    """Import the opened library as module ``name`` and register it."""
    loader = importlib.machinery.ExtensionFileLoader(name, opened.proc_path)
    spec = importlib.util.spec_from_file_location(name, opened.proc_path, loader=loader)
    if spec is None:
        raise ImportError(f"{name}: cannot be imported from {opened.path}", name=name)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return sys.modules.setdefault(name, module)


def _torch() -> Any:
    import torch

    return torch


def torch_extras() -> list[str]:
    """What a library that includes torch's headers depends on."""
    torch = _torch()
    versions = (torch.__version__, torch._C._GLIBCXX_USE_CXX11_ABI, torch.version.cuda)
    return [soabi(), *(str(item) for item in versions), str(torch.version.hip)]


def torch_flags(name: str) -> list[str]:
    """Compiler flags of a torch extension."""
    abi = int(_torch()._C._GLIBCXX_USE_CXX11_ABI)
    return [
        f"-DTORCH_EXTENSION_NAME={name}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        "-std=c++20",  # torch's headers of 2.13 and later may ask for it
    ]


def torch_includes() -> list[str]:
    """Folders of torch's and Python's headers."""
    base = os.path.join(os.path.dirname(_torch().__file__), "include")
    own = os.path.join(base, "torch", "csrc", "api", "include")
    return [base, own, toolchain.python_include()]


def torch_libraries(cuda: bool) -> list[str]:
    """Linker flags of a torch extension."""
    folder = os.path.join(os.path.dirname(_torch().__file__), "lib")
    names = ["c10", "torch", "torch_cpu", "torch_python"]
    if cuda and _torch().version.cuda is not None:
        names.extend(["c10_cuda", "torch_cuda"])
    return [f"-L{folder}", *(f"-l{name}" for name in names)]

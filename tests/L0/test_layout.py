"""Imports of the package follow its layers and form no circle (docs/architecture.md)."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What each part of apex_te may import, besides itself; the modules at its root may import all.
LAYERS = {
    "contract": {"runtime"},
    "recipe": {"runtime"},
    "runtime": {"op_builder"},
    "ops": {"contract", "runtime", "op_builder"},
    "comm": {"recipe", "runtime", "ops", "permutation", "op_builder"},
    "fp8": {"recipe", "runtime", "ops", "comm"},
    "module": {"recipe", "runtime", "ops", "permutation", "router", "comm", "fp8"},
    "graphs": {"recipe", "runtime", "ops", "comm", "fp8", "module"},
    "optimizers": {"runtime", "ops", "comm"},
    "integrations": {"recipe", "runtime", "ops", "comm", "fp8", "module", "graphs", "permutation"}
    | {"router", "distributed", "optimizers", "op_builder", "compatibility", "_version"},
    "integrations.apex": {"recipe", "runtime", "ops", "comm", "module", "permutation", "amp"}
    | {"distributed", "optimizers", "op_builder", "compatibility", "integrations"},
    "amp": {"recipe", "runtime", "ops", "comm", "fp8", "module", "optimizers", "integrations"},
    "distributed": {"recipe", "runtime", "ops", "comm", "fp8", "module"},
    "permutation": {"runtime", "ops"},
    "router": {"runtime", "ops"},
    "jax": {"contract", "recipe", "runtime", "op_builder"},
    "nvtx": {"op_builder"},
    "op_builder": set(),
    "compatibility": {"_version", "op_builder", "runtime", "ops", "optimizers"},
}
# Of these, "jax" imports no torch, and all other parts none of the others.
FRAMEWORKS = ("torch", "jax", "flax", "optax")
# Imports that are to go, which this list may only lose.
UPWARD: set[tuple[str, str]] = set()
CIRCLES: set[frozenset[str]] = set()
PRIVATE = {
    ("apex_te.parameter", "_rebuild"),  # which stays: it is in saved files
}


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def _modules() -> dict[str, Path]:
    """Every module of the package by its name: apex_te.x, apex_te.op_builder.x."""
    found = {}
    for folder, name in (
        ("apex_te", "apex_te"),
        ("op_builder", "apex_te.op_builder"),
        ("compatibility", "apex_te.compatibility"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((name, *parts))] = path
    return found


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Full name of what a ``from`` statement imports from."""
    if not node.level:
        return node.module or ""
    base = module.split(".") if is_package else module.split(".")[:-1]
    base = base[: len(base) - node.level + 1]
    return ".".join((*base, node.module) if node.module else base)


@functools.cache
def _imports() -> dict[str, set[str]]:
    """For each module the modules it imports, anywhere in it, for type checkers too."""
    graph, modules = {}, _modules()
    for module, path in modules.items():
        found = set()
        for node in _nodes(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                source = _absolute(node, module, path.name == "__init__.py")
                names = [f"{source}.{alias.name}" for alias in node.names]
                names = [name if name in modules else source for name in names]
            else:
                continue
            found.update(name for name in names if name in modules and name != module)
        graph[module] = found
    return graph


def _private_names(modules: dict[str, Path]) -> set[tuple[str, str]]:
    """Pairs of a module and an underscored name that it takes from another module."""
    found = set()
    for module, path in modules.items():
        nodes = _nodes(path)
        others = set()  # names by which the module knows other modules
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                source = _absolute(node, module, path.name == "__init__.py")
                for alias in node.names:
                    if f"{source}.{alias.name}" in modules:
                        others.add(alias.asname or alias.name)
                    elif source in modules:
                        found.add((module, alias.name))
        for node in nodes:
            of = node.value if isinstance(node, ast.Attribute) else None
            if isinstance(of, ast.Name) and of.id in others:
                found.add((module, node.attr))
    return {(module, name) for module, name in found if re.match("_(?!_)", name)}


def _part(module: str) -> str:
    """Layer of a module: its first name below ``apex_te``, or its first two if these are one."""
    names = module.split(".")[1:3]
    joined = ".".join(names)
    return joined if joined in LAYERS else names[0] if names else "apex_te"


def _circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules that import each other in a loop (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = set()

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            members = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(members) > 1:
                found.add(frozenset(members))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def _upward(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Imports that ``LAYERS`` does not allow, as pairs of modules."""
    return {
        (module, target)
        for module, targets in graph.items()
        for target in targets
        if _part(module) in LAYERS
        and _part(target) != _part(module)
        and _part(target) not in LAYERS[_part(module)]
    }


def test_imports_follow_the_layers() -> None:
    graph = _imports()
    assert {_part(module) for module in graph if "." in module} - set(LAYERS) <= {
        "__main__", "_version", "autocast", "graph", "parameter", "state", "statistics",
    }, "a new part of apex_te needs its line in LAYERS"  # fmt: skip
    assert _upward(graph) == UPWARD


def _frameworks(path: Path) -> set[str]:
    """Deep-learning frameworks that a module imports, anywhere in it but for type checkers."""
    typed = {
        id(each)
        for node in _nodes(path)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for each in ast.walk(node)
    }
    found = set()
    for node in _nodes(path):
        if id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found & set(FRAMEWORKS)


def test_the_front_ends_of_torch_and_jax_are_apart() -> None:
    modules, graph = _modules(), _imports()
    mixed = {
        module: used
        for module, path in modules.items()
        if (
            used := _frameworks(path) & ({"torch"} if _part(module) == "jax" else {*FRAMEWORKS[1:]})
        )
    }
    assert mixed == {}
    reached: set[str] = set()
    waiting = [module for module in graph if _part(module) == "jax"]
    while waiting:
        module = waiting.pop()
        if module not in reached and module != "apex_te":
            reached.add(module)
            waiting += graph[module]
    # Of what JAX's side may reach, these import torch inside of functions that it does not call.
    assert {module for module in reached if "torch" in _frameworks(modules[module])} <= {
        "apex_te.op_builder.jit.backends.archs", "apex_te.op_builder.jit.backends.pybind",
        "apex_te.recipe",
    }  # fmt: skip


def test_private_modules_of_jax_are_not_used() -> None:
    for path in [
        *(ROOT / "apex_te" / "jax").rglob("*.py"),
        *(ROOT / "tests/L0/with_jax").rglob("*.py"),
    ]:
        assert "jax._src" not in path.read_text(), path


def test_no_module_uses_private_names_of_another() -> None:
    assert _private_names(_modules()) == PRIVATE


def test_no_module_imports_itself_through_others() -> None:
    modules, graph = _modules(), {**_imports()}
    # A package's __init__ that only hands names on is not a part of a circle.
    packages = {name for name, path in modules.items() if path.name == "__init__.py"}
    for name in packages:
        graph[name] = {target for target in graph[name] if not target.startswith(f"{name}.")}
    assert _circles(graph) == CIRCLES


def test_the_checks_see_what_they_forbid() -> None:
    loop = {"apex_te.ops.a": {"apex_te.fp8.b"}, "apex_te.fp8.b": {"apex_te.ops.a"}}
    assert _circles(loop) == {frozenset(loop)}
    assert _upward(loop) == {("apex_te.ops.a", "apex_te.fp8.b")}


def test_internal_modules_have_no_all() -> None:
    internal = [
        path
        for path in (ROOT / "apex_te").rglob("*.py")
        if re.search(r"/_[a-z]", path.relative_to(ROOT).as_posix())
        and "transformer_engine" not in path.parts
    ]
    assert len(internal) > 50
    assert [p for p in internal if re.search(r"^__all__", p.read_text(), re.MULTILINE)] == []

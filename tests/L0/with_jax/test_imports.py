"""apex_te with JAX: without torch, and beside torch in either order."""

import os
import sys
from pathlib import Path

import pytest
from programs import captured

ROOT = Path(__file__).resolve().parents[3]

WITHOUT_TORCH = """
import importlib.abc, sys
class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")
sys.meta_path.insert(0, NoTorch())
"""
NORM = """
def norm():
    import jax, jax.numpy as jnp
    from apex_te.jax._call import call
    x = (jnp.arange(96) / 16 - 3).astype(jnp.bfloat16).reshape(3, 32)
    results = {"y": jax.ShapeDtypeStruct((3, 32), x.dtype),
               "rstd": jax.ShapeDtypeStruct((3,), "float32")}
    made = jax.jit(lambda x: call("rms_norm", "rms_norm_fwd", results=results, x=x, eps=1e-5,
                                  zero_centered_gamma=False))(x)
    return made["y"].astype(jnp.float32).tolist()
def torch_norm():
    import torch
    from apex_te.ops.rms_norm import rms_norm
    x = (torch.arange(96) / 16 - 3).bfloat16().reshape(3, 32)
    return rms_norm(x, None).float().tolist()
"""


def run(code):
    """Runs code in a new interpreter; returns what it printed."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = captured([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    return done.stdout.strip()


def test_without_torch_the_package_imports_and_its_torch_names_say_what_is_missing():
    code = """
import apex_te, apex_te.op_builder, operator, sys
from apex_te import make_recipe, recipe
kept = [apex_te.__version__, recipe.DelayedScaling(), make_recipe("blockwise"), apex_te.prebuild]
assert recipe.Format.HYBRID.value.dtype_names == ("float8_e4m3fn", "float8_e5m2")
assert recipe.Format.HYBRID.value.max_bwd == 57344
assert hash(recipe.DelayedScaling()) == hash(recipe.DelayedScaling())
rest = [n for n in apex_te.__all__ if n not in ("__version__", "make_recipe", "prebuild", "recipe",
                                                "compatibility", "integrations")]
rest += [f"integrations.{n}" for n in apex_te.integrations.__all__]
for name in rest:
    try:
        operator.attrgetter(name)(apex_te)
    except ImportError as error:
        assert error.name == "torch", name
    else:
        raise AssertionError(name)
try:
    recipe.Format.HYBRID.value.fwd_dtype
except ImportError:
    print(len(rest) > 30, "torch" in sys.modules)
"""
    assert run(WITHOUT_TORCH + code) == "True False"


def test_torch_is_imported_with_the_first_name_that_needs_it():
    code = """
import sys, apex_te
from apex_te import recipe
before = "torch" in sys.modules
apex_te.Linear
print(before, "torch" in sys.modules, "jax" in sys.modules)
"""
    assert run(code) == "False True False"


OLD_TORCH = """
import sys, types
torch = types.ModuleType("torch")
torch.Tensor, torch.__version__ = object, "2.9.0"
sys.modules["torch"] = torch
try:
    import apex_te
except ImportError as error:
    print(error)
"""


def test_an_old_torch_that_is_there_is_refused_at_once():
    assert run(OLD_TORCH).endswith("which torch 2.10 and later have, got torch 2.9.0")


def test_a_program_runs_without_torch():
    pytest.importorskip("jax")
    code = 'norm(); import sys; print("torch" in sys.modules)'
    assert run(WITHOUT_TORCH + NORM + code) == "False"


@pytest.mark.parametrize("first", ["torch", "jax"])
def test_torch_and_jax_give_the_same_bits_in_one_process(first):
    pytest.importorskip("jax")
    order = "torch_norm(), norm()" if first == "torch" else "norm(), torch_norm()"
    code = f"import {first}\na, b = {order}\nprint(len(a), a == b)"
    assert run(NORM + code) == "3 True"


def test_the_front_end_imports_no_torch_where_it_is_installed():
    pytest.importorskip("jax")
    assert run("import sys, apex_te.jax; print('torch' in sys.modules)") == "False"

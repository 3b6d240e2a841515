"""Programs with ops that leave their process: the persistent compilation cache, and export."""

import os
import sys
from pathlib import Path

import pytest
from programs import captured

pytest.importorskip("jaxlib")

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import jax, jax.numpy as jnp
from apex_te.jax.ops.rms_norm import rms_norm
x = (jnp.arange(96, dtype="float32") / 16 - 3).reshape(3, 32)
def loss(x):
    return (rms_norm(x, None) ** 3).sum()
"""
CACHED = """
import sys
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
program = jax.jit(jax.grad(loss))
found = program(x)
hit = any("cache_hits" in name for name in hits)
print(hit, found.tobytes().hex() if hasattr(found, "tobytes") else bytes(found).hex())
"""
EXPORT = """
import sys
from jax import export
checks = [export.DisabledSafetyCheck.custom_call(f"apex_te.rms_norm_{n}") for n in ("fwd", "bwd")]
made = export.export(jax.jit(jax.grad(loss)), platforms=sys.argv[2:], disabled_checks=checks)(x)
open(sys.argv[1], "wb").write(made.serialize())
print(jax.grad(loss)(x).tobytes().hex())
"""
RELOAD = """
import sys, jax, jax.numpy as jnp
from jax import export
import apex_te.jax
apex_te.jax.load("rms_norm", "cpu")
x = (jnp.arange(96, dtype="float32") / 16 - 3).reshape(3, 32)
found = export.deserialize(bytearray(open(sys.argv[1], "rb").read())).call(x)
print(found.tobytes().hex())
"""


def run(code, *arguments, **environment):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return captured(
        [sys.executable, "-c", code, *arguments],
        check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def lines(code, *arguments):
    done = run(code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_second_process_finds_the_program_in_the_persistent_cache(tmp_path):
    first = lines(PROGRAM + CACHED, str(tmp_path))
    second = lines(PROGRAM + CACHED, str(tmp_path))
    assert (first[0], second[0]) == ("False", "True")
    assert first[1] == second[1]


def test_an_exported_program_runs_where_nothing_was_traced(tmp_path):
    pytest.importorskip("flatbuffers")
    file = str(tmp_path / "program")
    assert lines(PROGRAM + EXPORT, file, "cpu") == lines(RELOAD, file)


def test_lowering_for_gpus_without_one_names_what_chooses_the_arch(tmp_path):
    done = run(PROGRAM + EXPORT, str(tmp_path / "program"), "cuda", APEX_TE_CUDA_ARCH_LIST="")
    if "no GPU is visible" not in done.stderr and done.returncode == 0:
        pytest.skip("a GPU is here")
    assert "APEX_TE_CUDA_ARCH_LIST" in done.stderr


def test_load_refuses_what_it_does_not_know():
    from apex_te.op_builder import UnknownOpError

    import apex_te.jax
    from apex_te.jax import _library

    with pytest.raises(UnknownOpError, match="there is no op 'frog'"):
        apex_te.jax.load("frog")
    with pytest.raises(ValueError, match='platforms must be "cpu" or "cuda", got \'tpu\''):
        apex_te.jax.load("rms_norm", "tpu")
    with pytest.raises(NotImplementedError, match="peer_send: XLA has collectives of its own"):
        _library.bind("peer_exchange", "peer_send", "cuda")

"""Errors of the search for a library and of its build are never told as errors of arguments."""

from __future__ import annotations

import subprocess
import sys

# Each place fails with each error while an op is called; then the same calls succeed.
CODE = """
import torch
from apex_te import RMSNorm
from apex_te.op_builder import BuildError
from apex_te.op_builder.core import CoreBuilder
from apex_te.op_builder.jit.build import service
from apex_te.op_builder.jit.find import cache, key
from apex_te.ops.rms_norm import rms_norm
from apex_te.ops.swiglu import swiglu
from apex_te.runtime import dispatcher

x, weight = torch.ones(2, 8), torch.ones(8)
CALLS = {
    "rms_norm": lambda: rms_norm(x, weight, eps=1e-5),
    "swiglu": lambda: swiglu(x),
    "module": lambda: RMSNorm(8)(x),
}
ERRORS = (TypeError, AttributeError, ValueError, OSError, IndexError, RuntimeError, KeyError)

def check(places):
    for owner, name in places:
        before = getattr(owner, name)
        for error in ERRORS:
            def fail(*args, **kwargs):
                raise error("planted")
            setattr(owner, name, fail)
            for call_name, call in CALLS.items():
                try:
                    call()
                except BuildError as raised:
                    assert "planted" in str(raised), (name, error, raised)
                except Exception as raised:
                    raise AssertionError((name, error, call_name)) from raised
                else:
                    raise AssertionError((name, error, call_name, "succeeded"))
        setattr(owner, name, before)

SEARCH = [(service, "look_up"), (cache, "key_of"), (key, "key_flags")]
check([*SEARCH, (dispatcher, "_import_core")])
core = dispatcher.core()
check([*SEARCH, (core, "open_library"), (core, "symbol")])
service._opened.clear()
service.look_up, found = lambda *args: None, service.look_up
check([(service, "build")])
service.look_up = found
assert rms_norm(x, weight).shape == x.shape and swiglu(x).shape == (2, 4)
try:
    rms_norm(x, "weight")
except TypeError as error:
    print(error)
"""


def test_failing_machinery_is_a_build_error() -> None:
    """Whatever fails in finding, building or loading a library raises BuildError with its cause."""
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    assert done.stdout == "rms_norm: weight must be a torch.Tensor, got str\n"

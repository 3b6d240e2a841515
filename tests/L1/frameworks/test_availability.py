"""The frameworks' own checks find the alias, whichever way it is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest
from pins import ROOT
from programs import captured

CHECKS = {
    "accelerate": """
from accelerate.utils import is_fp8_available, is_transformer_engine_available
assert is_transformer_engine_available() and is_fp8_available()
""",
    "lightning": """
from lightning.fabric.plugins.precision.transformer_engine import _TRANSFORMER_ENGINE_AVAILABLE
assert bool(_TRANSFORMER_ENGINE_AVAILABLE), str(_TRANSFORMER_ENGINE_AVAILABLE)
""",
    "peft": """
from peft.import_utils import is_te_available, is_te_pytorch_available
assert is_te_available() and is_te_pytorch_available()
""",
    "megatron": """
from megatron.core.utils import get_te_version, is_te_min_version
assert is_te_min_version("2.14.0") and not is_te_min_version("2.15.0"), get_te_version()
from megatron.core.extensions import transformer_engine
assert transformer_engine.HAVE_TE
""",
}
FOUND = [name for name in CHECKS if importlib.util.find_spec(name) is not None]


@pytest.mark.skipif(not FOUND, reason="no framework is installed")
@pytest.mark.parametrize("way", ["install", "environment", "files"])
def test_checks_are_true(way, tmp_path):
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("APEX_TE_T")}
    environment["PYTHONPATH"] = os.pathsep.join(path)
    begin = ""
    if way == "install":
        begin = "from apex_te.integrations import transformer_engine as t; t.install()"
    elif way == "environment":
        begin, environment["APEX_TE_TRANSFORMER_ENGINE"] = "import apex_te", "1"
    else:
        write = [sys.executable, "-m", "apex_te", "install-alias", "--prefix", str(tmp_path)]
        subprocess.run(write, env=environment, check=True)
        folder = next(tmp_path.rglob("transformer_engine")).parent
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *path])
    body = begin + "".join(CHECKS[name] for name in FOUND)
    captured([sys.executable, "-c", body], env=environment)

"""amp's only global state is put back after each test; the optimizers' helpers are importable."""

import sys
from pathlib import Path

import pytest

from apex_te.amp.loss import state

sys.path.append(str(Path(__file__).resolve().parent.parent / "optimizers"))


@pytest.fixture(autouse=True)
def _no_amp(monkeypatch):
    monkeypatch.setattr(state, "scalers", None)

"""The versions of frameworks are the same wherever they are named."""

import re

from pins import ROOT, pin


def test_the_tools_environment_has_the_pinned_versions():
    text = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    versions = dict(re.findall(r"^([\w-]+)==([\w.]+)", text, re.MULTILINE))
    for name in ("accelerate", "peft", "transformers"):
        assert versions[name] == pin(name)

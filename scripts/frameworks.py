"""Installs the frameworks of tests/L1/frameworks, in the versions that pyproject.toml names.

    .venv-frameworks/bin/python scripts/frameworks.py

Installs into the environment of the Python that runs it. A stamp keyed by the versions makes the
next call return at once. torch stays as it is.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]


def install(*arguments: str) -> None:
    """Runs ``pip install`` with the arguments; ends the program with its status if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    done = subprocess.run([*command, *arguments], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def main() -> None:
    """Installs what is not there yet."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    wanted, alone = extras["frameworks"], extras["frameworks-alone"]
    key = hashlib.sha256("\n".join([sys.version, *wanted, *alone]).encode()).hexdigest()
    stamp = Path(sys.prefix) / "frameworks.stamp"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == key:
        return
    print(f"frameworks: installing {' '.join([*wanted, *alone])}", flush=True)
    torch = f"torch=={metadata.version('torch').partition('+')[0]}"
    # DeepSpeed's sources look for torch while they are built.
    install("--no-build-isolation", torch, *wanted)
    install("--no-deps", *alone)
    stamp.write_text(key, encoding="utf-8")


if __name__ == "__main__":
    main()

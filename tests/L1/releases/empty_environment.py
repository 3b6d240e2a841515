"""An environment that holds a torch, what torch needs, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement


def needed(names):
    """The installed distributions that ``names`` require, with those that these require."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        key = name.lower().replace("_", "-").replace(".", "-")
        if key in found:
            continue
        found.add(key)
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


class EmptyEnvironment:
    """A virtual environment in ``folder`` with links to some of this one's distributions."""

    def __init__(self, folder, distributions):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        for name in needed(distributions):
            self._link(metadata.distribution(name))

    def _link(self, distribution):
        """Links the top-level files and folders of a distribution."""
        files = distribution.files or []
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            source, target = Path(str(distribution.locate_file(top))), self.site / top
            if source.exists() and not target.exists():
                target.symlink_to(source)

    def install(self, wheel, *options):
        """Installs a wheel by this environment's pip, from the disk alone."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python)]
        command += ["--disable-pip-version-check", "install", "--quiet", "--no-index", *options]
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [*command, str(wheel)], env=variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, code, **variables):
        """Runs code where no program is on PATH and ``variables`` are all that is set."""
        return subprocess.run(
            [str(self.python), "-c", code],
            cwd="/",
            env={"PATH": "/nonexistent", **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )

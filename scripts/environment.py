"""Makes or reuses the virtual environment that the Makefile's commands run in.

    python3 scripts/environment.py .venv

Needs nothing but Python. A torch that the given Python imports already, and that has what apex_te
needs, is used as it is (a vendor's or CUDA build stays); otherwise the pinned one is installed.
A stamp keyed by what was asked for makes the next call return at once.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements-dev.txt"
TORCH = "torch==2.13.0"
# Prints the folder that holds a torch fit for apex_te; fails where there is none.
FIND_TORCH = (
    "import torch, pathlib;"
    "torch.Tensor.__dlpack_c_exchange_api__;"
    "print(pathlib.Path(torch.__file__).parents[1])"
)
# Fails where one is missing; imports neither, which would take seconds.
INSTALLED = "from importlib.util import find_spec as f; 1 / bool(f('torch') and f('apex_te'))"
# One line per requirement that the environment does not meet exactly: 'other' or 'absent'.
CHECK = """
import sys
from importlib import metadata
for line in sys.stdin.read().split():
    name, _, version = line.partition("==")
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        print(line, "absent", "-")
    else:
        if found != version:
            print(line, "other", found)
"""


def say(text: str) -> None:
    print(f"environment: {text}", flush=True)


def output(python: Path | str, code: str, stdin: str = "") -> str | None:
    """Returns what ``code`` prints under ``python``, or None when it fails."""
    done = subprocess.run(
        [str(python), "-c", code], input=stdin, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def requirements() -> list[str]:
    """Returns the pinned requirements that hold for this Python, as ``name==version``."""
    wanted = []
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        requirement, _, marker = line.partition("#")[0].partition(";")
        match = re.fullmatch(r'\s*python_version (>=|<) "(\d+)\.(\d+)"\s*', marker)
        if marker and not match:
            raise SystemExit(f"environment: {REQUIREMENTS.name}: cannot read marker {marker!r}")
        if match:
            newer = sys.version_info[:2] >= (int(match[2]), int(match[3]))
            if newer != (match[1] == ">="):
                continue
        if requirement.strip():
            wanted.append(requirement.strip())
    return wanted


class Environment:
    """The virtual environment at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.stamp = path / "environment.stamp"
        self.own_pip = True

    def key(self) -> str:
        """Returns a hash of everything that decides the environment's content."""
        digest = hashlib.sha256(f"{sys.executable} {sys.version} {ROOT} {TORCH}".encode())
        for name in ("pyproject.toml", "setup.py", REQUIREMENTS.name, "scripts/environment.py"):
            file = ROOT / name
            digest.update(name.encode() + (file.read_bytes() if file.exists() else b""))
        return digest.hexdigest()

    def is_current(self) -> bool:
        return (
            self.stamp.exists()
            and self.stamp.read_text(encoding="utf-8").splitlines()[:1] == [self.key()]
            and output(self.python, INSTALLED) is not None
        )

    def create(self, torch_folder: str | None) -> None:
        """Makes an empty environment; it sees the given torch where there is one."""
        command = [sys.executable, "-m", "venv", "--clear", str(self.path)]
        if torch_folder is not None:
            command.append("--system-site-packages")
        self.own_pip = importlib.util.find_spec("ensurepip") is not None
        if not self.own_pip:
            command.append("--without-pip")
            if importlib.util.find_spec("pip") is None:
                raise SystemExit(
                    f"environment: {sys.executable} has neither ensurepip nor pip; install one of "
                    "them (on Debian and Ubuntu: apt install python3-venv) and run this again"
                )
        subprocess.run(command, check=True)
        if torch_folder is not None and output(self.python, FIND_TORCH) is None:
            # The Python is itself in a virtual environment, whose packages venv does not pass on.
            site = output(self.python, "import sysconfig; print(sysconfig.get_path('purelib'))")
            line = f"import site; site.addsitedir({torch_folder!r})\n"
            (Path(str(site)) / "base_packages.pth").write_text(line, encoding="utf-8")
            if output(self.python, FIND_TORCH) is None:
                raise SystemExit(f"environment: torch of {torch_folder} fails in {self.path}")

    def pip(self, *arguments: str, quiet: bool = False) -> bool:
        """Returns True if ``pip install`` with these arguments succeeded."""
        if self.own_pip:
            command = [str(self.python), "-m", "pip"]
        else:
            command = [sys.executable, "-m", "pip", "--python", str(self.python)]
        command += ["--disable-pip-version-check", "install", "--quiet", "--retries", "2"]
        # The apex_te in the environment must be the one that pip installs, not one on this path.
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        errors = subprocess.DEVNULL if quiet else None
        return (
            subprocess.run(
                [*command, *arguments], cwd=ROOT, env=variables, stderr=errors, check=False
            ).returncode
            == 0
        )

    def install_tools(self) -> None:
        """Installs the pinned tools; goes on with what is there when one cannot be had."""
        wanted = "\n".join(requirements())
        lines = (output(self.python, CHECK, wanted) or "").splitlines()
        missing = [line.split() for line in lines]
        if not missing:
            return
        names = [name for name, _, _ in missing]
        say(f"installing {' '.join(names)}")
        if self.pip(*names, quiet=True):
            return
        say("not all of them could be installed together; trying what is absent one by one")
        for name, state, found in missing:
            if state == "other":
                say(f"using {name.partition('==')[0]} {found} instead of {name}")
            elif not self.pip(name, quiet=True):
                say(f"could not install {name}; what needs it will say so")

    def install_project(self) -> None:
        """Installs the project editable, so that the checkout's files run; compiles nothing."""
        arguments = ["--no-build-isolation", "--editable", str(ROOT)]
        if self.pip(*arguments, quiet=True) or self.pip("--no-deps", *arguments):
            return
        raise SystemExit("environment: installing the project failed, see above")

    def make(self) -> None:
        """Makes the whole environment, from nothing."""
        torch_folder = output(sys.executable, FIND_TORCH)
        self.create(torch_folder)
        if torch_folder is not None:
            version = output(self.python, "import torch; print(torch.__version__)")
            say(f"using torch {version} of {torch_folder}")
        else:
            say(f"installing {TORCH}")
            if not self.pip(TORCH):
                raise SystemExit(f"environment: {TORCH} could not be installed, see above")
        self.install_tools()
        self.install_project()
        if output(self.python, "import torch, apex_te") is None:
            subprocess.run([str(self.python), "-c", "import apex_te"], check=False)
            raise SystemExit("environment: apex_te does not import in it, see above")
        self.stamp.write_text(f"{self.key()}\n{sys.executable}\n", encoding="utf-8")

    def leave(self) -> None:
        """Starts again with the Python that an active environment was made from."""
        if Path(sys.prefix).resolve() != self.path.resolve():
            return
        recorded = (
            self.stamp.read_text(encoding="utf-8").splitlines() if self.stamp.exists() else []
        )
        base = recorded[1] if len(recorded) > 1 else getattr(sys, "_base_executable", "")
        if not base or Path(base).parent == self.path / "bin":
            raise SystemExit(f"environment: deactivate {self.path} and run this again")
        os.execv(base, [base, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", type=Path, help="where the environment is or shall be")
    environment = Environment(parser.parse_args().path.absolute())
    environment.leave()
    if sys.version_info < (3, 10):  # noqa: UP036 - runs before anything checks it
        raise SystemExit(f"environment: Python must be 3.10 or later, got {sys.version.split()[0]}")
    if environment.path.exists() and not (environment.path / "pyvenv.cfg").exists():
        raise SystemExit(f"environment: {environment.path} exists and is not a virtual environment")
    if not environment.is_current():
        if environment.path.is_symlink():  # another checkout's, which venv --clear would empty
            raise SystemExit(
                f"environment: {environment.path} must not be a link to an environment that does "
                f"not fit, got a link to {environment.path.resolve()}: remove the link"
            )
        say(f"making {environment.path} with {sys.executable}")
        environment.make()
        say("ready")


if __name__ == "__main__":
    main()

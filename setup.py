"""Installation: pure Python by default; APEX_BUILD_* variables make libraries beforehand.

Everything is built in a temporary folder, so that the checkout stays as it was, and torch is not
imported.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile

sys.dont_write_bytecode = True  # op_builder is imported from the checkout
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

from setuptools import Distribution, find_packages, setup  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402
from setuptools.command.egg_info import egg_info  # noqa: E402

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1
    from wheel.bdist_wheel import bdist_wheel

from op_builder import all_builders  # noqa: E402
from op_builder.jit.errors import BuildError, PrebuildError  # noqa: E402
from op_builder.jit.prebuild import batch, install  # noqa: E402
from op_builder.jit.prebuild.batch import Targets  # noqa: E402

BUILDERS = all_builders()
try:
    CHOICES = install.check_install(BUILDERS, sys.argv)
    LABEL = install.version_label()
except BuildError as error:
    raise SystemExit(f"apex_te: {error}") from None
for note in install.notes(BUILDERS):
    print(f"apex_te: {note}", flush=True)
PREBUILT = any(choice.wanted for choice in CHOICES)
SOURCE_ENDINGS = (".h", ".hpp", ".cuh", ".cpp", ".cu", ".LICENSE")

WORK = tempfile.mkdtemp(prefix="apex_te-build-")
atexit.register(shutil.rmtree, WORK, ignore_errors=True)


class BuildPython(build_py):
    """Copies the package, csrc beside it, and makes the libraries that were asked for."""

    def run(self) -> None:
        super().run()
        package = os.path.join(self.build_lib, "apex_te")
        editable = getattr(self, "editable_mode", False)
        if not editable:
            self._copy_sources(os.path.join(package, "csrc"))
        if PREBUILT:
            self._prebuild(None if editable else os.path.join(package, "prebuilt"))

    def _copy_sources(self, target: str) -> None:
        for folder, _, names in os.walk(os.path.join(HERE, "csrc")):
            for name in sorted(names):
                if name.endswith(SOURCE_ENDINGS):
                    relative = os.path.relpath(folder, os.path.join(HERE, "csrc"))
                    self.mkpath(os.path.join(target, relative))
                    self.copy_file(os.path.join(folder, name), os.path.join(target, relative, name))

    def _prebuild(self, target: str | None) -> None:
        """Builds libraries into the package, or into the user's cache for an editable install."""
        try:
            if target is None:
                report = batch.into_cache(BUILDERS, CHOICES, Targets.find())
            else:
                report = install.into_package(BUILDERS, CHOICES, os.path.abspath(target))
        except PrebuildError as error:
            print(f"\napex_te: libraries built ahead of time\n{error.report}\n", flush=True)
            raise SystemExit(f"apex_te: {error}") from None
        except BuildError as error:
            raise SystemExit(f"apex_te: {error}") from None
        print(f"\napex_te: libraries built ahead of time\n{report}\n", flush=True)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Returns the files of the installation, with those made beyond the modules."""
        outputs = list(super().get_outputs(include_bytecode))
        for part in ("csrc", "prebuilt"):
            for folder, _, names in os.walk(os.path.join(self.build_lib, "apex_te", part)):
                outputs.extend(os.path.join(folder, name) for name in names)
        return outputs


class EggInfo(egg_info):
    """Metadata whose version has the label of ``APEX_BUILD_LABEL``.

    A command, since the setup.cfg that setuptools writes into an sdist overrides plain options.
    """

    def finalize_options(self) -> None:
        self.tag_build = LABEL
        super().finalize_options()


class PrebuiltDistribution(Distribution):
    """A distribution with libraries inside: its wheel serves one platform."""

    def has_ext_modules(self) -> bool:
        return True


class Wheel(bdist_wheel):
    """A wheel for every Python: an op's library knows none, the dispatcher is there per Python."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        if not PREBUILT:
            return python, abi, platform
        return "py3", "none", platform.replace(os.uname().machine, install.named_machine())


def _packages() -> tuple[list[str], dict[str, str]]:
    names = ["apex_te"]
    names.extend(f"apex_te.{name}" for name in find_packages(os.path.join(HERE, "apex_te")))
    if "editable_wheel" in sys.argv:
        # The checkout becomes a plain entry of sys.path, which type checkers read; they do not run
        # the finder that a mapping of folders needs. apex_te itself finds the other two beside it.
        return names, {"": "."}
    folders = {"apex_te": "apex_te"}
    for part in ("op_builder", "compatibility"):
        folders[f"apex_te.{part}"] = part
        names.append(f"apex_te.{part}")
        names.extend(f"apex_te.{part}.{name}" for name in find_packages(os.path.join(HERE, part)))
    return names, folders


PACKAGES, FOLDERS = _packages()
setup(
    license="Apache-2.0",
    packages=PACKAGES,
    package_dir=FOLDERS,
    package_data={"apex_te": ["py.typed"], "apex_te.compatibility": ["__init__.pyi"]},
    include_package_data=False,
    distclass=PrebuiltDistribution if PREBUILT else Distribution,
    cmdclass={"build_py": BuildPython, "bdist_wheel": Wheel, "egg_info": EggInfo},
    options={
        "build": {"build_base": os.path.join(WORK, "build")},
        "egg_info": {"egg_base": WORK},
        "bdist_wheel": {"bdist_dir": os.path.join(WORK, "wheel")},
    },
    zip_safe=False,
)

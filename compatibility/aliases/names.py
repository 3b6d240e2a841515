"""The aliases: what each name stands for, and what is known of the real library."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# Attribute that tells an alias's package, apex_te's or a stub, from a real one.
MARK = "__apex_te_alias__"


@dataclasses.dataclass(frozen=True)
class Alias:
    """Name of another library's package under which one of apex_te's packages is served.

    Attributes:
        name: the package's name.
        target: full name of the package that serves it.
        title: name of the real library in messages.
        distribution: the name of the distribution that the alias claims to be.
        distributions: the distributions of the real library.
        extensions: names of modules beside the package, which are found once it is imported, with
            the modules that serve them.
        packages: subpackages that other packages of apex_te serve, by their names, with these
            packages.
        level: version that the alias claims, the highest that it serves.
        variable: environment variable that installs the alias in a process.
        version_variable: environment variable with a version to claim, or "".
        server: module whose function ``serve`` a stub package calls.
    """

    name: str
    target: str
    title: str
    distribution: str
    distributions: tuple[str, ...]
    extensions: Mapping[str, str]
    packages: Mapping[str, str]
    level: str
    variable: str
    version_variable: str
    server: str

    @property
    def _pairs(self) -> tuple[tuple[str, str], ...]:
        """Names of packages by which the real library has them, and the packages that serve them;
        subpackages first.
        """
        return (*self.packages.items(), (self.name, self.target))

    def served_by(self, name: str) -> str | None:
        """Returns the full name of the module that serves the module ``name``, if one may."""
        return next(
            (
                package + name.removeprefix(own)
                for own, package in self._pairs
                if name == own or name.startswith(f"{own}.")
            ),
            None,
        )

    def second_name(self, module: str) -> str | None:
        """Returns the name under which a module of apex_te is served, None if it is not."""
        return next(
            (
                own + module.removeprefix(package)
                for own, package in self._pairs
                if module == package or module.startswith(f"{package}.")
            ),
            None,
        )


TRANSFORMER_ENGINE = Alias(
    name="transformer_engine",
    target="apex_te.integrations.transformer_engine",
    title="Transformer Engine",
    distribution="transformer-engine",
    distributions=(
        "transformer-engine",
        "transformer-engine-torch",
        "transformer-engine-cu12",
        "transformer-engine-cu13",
        "transformer-engine-jax",
    ),
    extensions={
        "transformer_engine_torch": "apex_te.integrations.transformer_engine._torch_extension"
    },
    packages={"transformer_engine.jax": "apex_te.jax"},
    # The highest version whose unguarded imports in frameworks find their names here.
    level="2.14.0",
    variable="APEX_TE_TRANSFORMER_ENGINE",
    version_variable="APEX_TE_TE_VERSION",
    server="apex_te.integrations.te_alias",
)
APEX = Alias(
    name="apex",
    target="apex_te.integrations.apex",
    title="apex",
    distribution="apex",
    distributions=("apex",),
    extensions={},  # apex_te.compatibility.apex finds them, also before the package is imported
    packages={},
    level="1.14.0",
    variable="APEX_TE_APEX",
    version_variable="",
    server="apex_te.compatibility.apex",
)
ALIASES = {alias.name: alias for alias in (TRANSFORMER_ENGINE, APEX)}

"""Makes ``apex_te.integrations.transformer_engine`` importable as ``transformer_engine``.

Frameworks look for that module and for the metadata of a distribution ``transformer-engine``.
``install`` and ``APEX_TE_TRANSFORMER_ENGINE=1`` provide both in one process, ``python -m apex_te
install-alias`` in all processes of an environment. Nothing here imports torch.
"""

from ...compatibility import aliases
from ...compatibility.aliases import TRANSFORMER_ENGINE, AliasError

__all__ = [
    "AliasError", "claimed_version", "install", "install_from_environment", "serve", "uninstall",
]  # fmt: skip


def install(*, missing_ok: bool = False) -> bool:
    """Makes ``import transformer_engine`` give apex_te's modules, in this process.

    Call it before importing a framework, since some look for Transformer Engine only once.
    Frameworks that find it may change their defaults. Calling it again changes nothing; if the
    files of ``python -m apex_te install-alias`` are present, they are used.

    Args:
        missing_ok: return False instead of raising an error if a real Transformer Engine is
            installed.

    Returns:
        True if the alias is installed.

    Raises:
        AliasError: a real Transformer Engine is installed or imported, or the files of the alias
            were made for another version of apex_te.
    """
    return aliases.install(TRANSFORMER_ENGINE, missing_ok=missing_ok)


def install_from_environment() -> None:
    """Installs the alias in this process if ``APEX_TE_TRANSFORMER_ENGINE`` is true."""
    aliases.install_from_environment(TRANSFORMER_ENGINE)


def uninstall() -> None:
    """Undoes ``install``, and removes the alias's modules from ``sys.modules``.

    Existing references stay valid. Modules of a real Transformer Engine, and the files written by
    ``python -m apex_te install-alias``, are not touched.
    """
    aliases.uninstall(TRANSFORMER_ENGINE)


def serve(made_for: str, version: str) -> None:
    """Replaces the stub package with the shims; only the stub package calls it.

    Args:
        made_for: version of apex_te that wrote the stub package.
        version: version that the shims are to show as theirs.

    Raises:
        ImportError: ``made_for`` is not the version of apex_te that runs.
    """
    aliases.serve(TRANSFORMER_ENGINE, made_for, version)


def claimed_version(level: str | None = None) -> str:
    """Returns the alias's version, such as ``"2.14.0+apexte.0.1.0"``.

    Args:
        level: Transformer Engine's release in it; None takes it from
            ``APEX_TE_TE_VERSION``, else the release that apex_te follows.

    Raises:
        ValueError: ``level`` is not a version such as ``"2.14.0"``.
    """
    return aliases.claimed_version(TRANSFORMER_ENGINE, level)

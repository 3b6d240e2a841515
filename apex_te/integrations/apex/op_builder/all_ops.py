"""Builders of apex's extensions by the extensions' names."""

from .builder import BUILDERS, OpBuilder

ALL_OPS: dict[str, OpBuilder] = {cls.NAME: cls() for cls in BUILDERS.values()}

"""Bases of the nnx modules: FP8 state in Variables, and Linen modules that compute on Variables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from ...recipe import DelayedScaling
from ...runtime.named_arguments import check_count
from ..boxes import is_box
from ..fp8_state import FP8_COLLECTION_NAME, is_state
from ..region import active_recipe
from .state import WRITES, FP8State, FP8Writes, is_variable, values

_COLLECTIONS: dict[str, type[nnx.Variable[Any]]] = {
    "params": nnx.Param, FP8_COLLECTION_NAME: FP8State, WRITES: FP8Writes, "cache": nnx.Cache,
}  # fmt: skip
# Extents of the other dimensions of the inputs for whose shapes parameters are made.
_LEADING = (128, 128)
_RATES = (
    "attention_dropout", "dropout_rate", "hidden_dropout", "intermediate_dropout",
    "intermediate_dropout_rate", "drop_path",
)  # fmt: skip


class FP8Holder(nnx.Module):
    """Module whose Variables, and those of its ``nnx.Dict``s, are collections of Linen."""

    def _assign(self, collections: Mapping[str, Any]) -> None:
        """Sets Variables with the values of collections."""
        for name, tree in collections.items():
            _assign(self, name, tree)

    def _values(self, parameters: Any = None) -> dict[str, Any]:
        """Returns collections' arrays; FP8 state is updated if a parameter is differentiated."""
        found: dict[str, Any] = {name: {} for name in _COLLECTIONS}
        _collect(self, found)
        state, writes = found.pop(FP8_COLLECTION_NAME), found.pop(WRITES)
        made = jax.tree.map(lambda v: v.get_value(), found, is_leaf=is_variable)
        if state:
            given = made["params"] if parameters is None else parameters
            made[FP8_COLLECTION_NAME] = values(state, writes, given)
        return made


class FromLinen(FP8Holder):
    """Base of the modules: a Linen module that computes on the Variables of this one."""

    def __init__(
        self,
        kind: type[nn.Module],
        fixed: Mapping[str, Any],
        options: Mapping[str, Any],
        rngs: nnx.Rngs | None,
    ) -> None:
        owner = type(self).__name__
        if rngs is not None and not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"{owner}: rngs must be an nnx.Rngs, got {type(rngs).__name__}")
        kinds: Any = kind
        names = {f.name for f in dataclasses.fields(kinds) if f.init} - {"parent", "name", *fixed}
        for name in options:
            if name not in names:
                raise TypeError(
                    f"{owner}: options must be other fields of {kind.__name__}, got {name!r}"
                )
        # nnx compares and hashes attributes that are not data.
        frozen = {n: tuple(o) if isinstance(o, list) else o for n, o in options.items()}
        self.linen: Any = kind(**fixed, **frozen, parent=None)
        stream = next((n for n in names if n.endswith("dropout_rng_name")), None)
        self.dropout_stream = None if stream is None else getattr(self.linen, stream)
        self.deterministic = False  # which eval() and train() set
        drops = any(getattr(self.linen, rate, None) for rate in _RATES)
        if drops and rngs is None:
            raise TypeError(f"{owner}: rngs must be an nnx.Rngs with dropout, got None")
        self.rngs = rngs[self.dropout_stream].fork() if drops and rngs is not None else None

    def _make_parameters(
        self, rngs: nnx.Rngs, *extents: Sequence[int], **masks: jax.ShapeDtypeStruct
    ) -> None:
        """Makes the variables, for inputs with these last extents."""
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(
                f"{type(self).__name__}: rngs must be an nnx.Rngs, got {type(rngs).__name__}"
            )
        inputs = tuple(jax.ShapeDtypeStruct((*_LEADING, *e), jnp.float32) for e in extents)
        options = {} if self.dropout_stream is None else {"deterministic": True}
        given = tuple({**masks, **options}.items())
        self._assign(_initial(self.linen, inputs, given, rngs.params()))

    def _any_mask(self) -> jax.ShapeDtypeStruct:
        """Returns the shape of a mask for the inputs of ``_make_parameters``."""
        return jax.ShapeDtypeStruct((1, 1, *_LEADING), jnp.bool_)

    def _apply(self, *args: Any, **options: Any) -> Any:
        """Calls the Linen module; ``deterministic`` None stands for the attribute."""
        variables = self._values()
        if not isinstance(active_recipe(), DelayedScaling):
            variables.pop(FP8_COLLECTION_NAME, None)
        rngs = None
        if self.dropout_stream is not None:
            if options["deterministic"] is None:
                options["deterministic"] = self.deterministic
            if self.rngs is not None and not options["deterministic"]:
                rngs = {self.dropout_stream: self.rngs()}
        if not options.get("decode"):
            return self.linen.apply(variables, *args, rngs=rngs, **options)
        out, changed = self.linen.apply(variables, *args, rngs=rngs, mutable=["cache"], **options)
        self._assign(changed)
        return out

    def _make_cache(self, *shapes: Sequence[int], dtype: Any) -> None:
        """Makes an empty cache for inputs of these shapes."""
        made = jax.eval_shape(
            lambda *x: self.linen.init(jax.random.key(0), *x, decode=True, deterministic=True),
            *(jax.ShapeDtypeStruct(tuple(shape), dtype) for shape in shapes),
        )
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made["cache"])
        self._assign({"cache": empty})


def checked_width(owner: nnx.Module, name: str, value: Any) -> int:
    """Returns a checked extent of an input."""
    check_count(type(owner).__name__, name, value)
    return int(value)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _initial(linen: Any, inputs: Any, options: Any, key: jax.Array) -> Any:
    """Returns a Linen module's variables for inputs of these shapes, which are not computed on."""
    return linen.lazy_init({"params": key}, *inputs, **dict(options))


def _assign(owner: Any, collection: str, tree: Mapping[str, Any]) -> None:
    """Sets Variables with the values of a collection, in an ``nnx.Dict`` for each submodule."""
    for name, value in tree.items():
        held = vars(owner).get(name)
        if isinstance(value, Mapping):
            if held is None:
                held = nnx.Dict()
                setattr(owner, name, held)
            _assign(held, collection, value)
        elif held is not None:
            held.set_value(value)
        else:
            setattr(owner, name, _variable(collection, value))
    if is_state(tree):
        setattr(owner, WRITES, FP8Writes(jnp.zeros(tree["uses"].shape, jnp.int32), ref=True))


def _variable(collection: str, value: Any) -> Any:
    """Returns a Variable with a value of a Linen collection, and the logical axes of its box."""
    if collection not in _COLLECTIONS:
        raise NotImplementedError(
            f"apex_te.jax.nnx: Linen variables must be in {', '.join(_COLLECTIONS)}, got"
            f" {collection!r}"
        )
    kind = _COLLECTIONS[collection]
    if kind is FP8State:
        return FP8State(value, ref=True)
    if not is_box(value):
        return kind(value)
    if not getattr(value, "names", ()):
        return kind(value.value)
    metadata = value.to_nnx_metadata()
    if not _are_placed(value.names):  # else nnx takes names without a rule for axes of the mesh
        metadata["eager_sharding"] = False
    return kind(metadata.pop("value"), **metadata)


def _are_placed(names: Sequence[str | None]) -> bool:
    """Returns True if rules, or the mesh itself, say where an array with these axes belongs."""
    rules, axes = dict(nn.get_logical_axis_rules()), jax.sharding.get_abstract_mesh().axis_names
    places = [rules.get(name, name) for name in names if name is not None]
    used = [axis for each in places for axis in (each if isinstance(each, tuple) else (each,))]
    return all(axis is None or axis in axes for axis in used)


def _collect(owner: Any, found: dict[str, Any]) -> None:
    """Adds the Variables of a module to the trees ``found`` of its collections."""
    for name, value in vars(owner).items():
        if isinstance(value, nnx.Dict):
            inner: dict[str, Any] = {collection: {} for collection in found}
            _collect(value, inner)
            for collection, tree in inner.items():
                if tree:
                    found[collection][name] = tree
        elif isinstance(value, nnx.Variable):
            for collection, kind in _COLLECTIONS.items():
                if isinstance(value, kind):
                    found[collection][name] = value

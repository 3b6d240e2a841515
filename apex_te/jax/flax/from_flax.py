"""``from_flax``, which makes the layers of a model of plain Flax compute in FP8."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from flax import nnx

from ...recipe import DelayedScaling, Recipe
from ...runtime import layer_names
from ..contraction import terms
from ..region import checked_recipe
from .dot_general import make_dot_general_cls, make_einsum_cls

__all__ = ["from_flax"]

_BLOCK = re.compile(r"([a-z]\w*_)?\d+")  # "Decoder_0" is Flax's name for one without a name
_MOE = re.compile(r"(?i)moe|experts?")
# Part of the key of nn.jit, so that a block is traced again for a model with another switch.
_active: Any = jax.make_user_context(default_value=None)

_Path = tuple[Any, ...]
_Table = tuple[_Path, int]  # path of the owner of an embedding, and the size of its vocabulary


class _Einsum(nn.Einsum):
    """``nn.Einsum`` whose product a module computes."""

    einsum_cls: Any = None

    @nn.compact
    def __call__(self, inputs: Any, einsum_str: str | None = None) -> Any:
        spec = nn.merge_param("einsum_str", self.einsum_str, einsum_str)
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        _, own, out = terms(spec, inputs.ndim, len(self.shape))
        broadcast = [self.shape[own.index(i)] if i in own else 1 for i in out]
        bias = None
        if self.use_bias:
            shape = [n for i, n in zip(out, broadcast, strict=True) if i in own]
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        y = self.einsum_cls()(
            spec, inputs, kernel, preferred_element_type=self.preferred_element_type
        )
        return y if bias is None else y + bias.reshape(broadcast)


class _Switch(NamedTuple):
    """Recipe, and names, patterns or predicates of the layers that use it or do not."""

    recipe: Recipe
    include: tuple[Any, ...] | None
    exclude: tuple[Any, ...]

    def chooses(self, path: _Path, layer: Any, tables: set[_Table], used: set[Any]) -> bool:
        """Returns True if a layer computes in FP8; choices that match are added to ``used``."""
        name = ".".join(map(str, path))

        def matching(choices: Iterable[Any]) -> set[Any]:
            return {
                one
                for one in choices
                if (layer_names.pattern(one)(name) if isinstance(one, str) else one(name, layer))
            }

        excluded, included = matching(self.exclude), matching(self.include or ())
        used |= excluded | included
        if excluded or self.include is not None:
            return not excluded and bool(included)
        return not _is_head(path, layer, tables) and not _is_router(name.split("."))

    def check(self, used: set[Any]) -> None:
        """Raises ValueError unless every name or pattern is among those that match a layer."""
        for argument, choices in (("include", self.include or ()), ("exclude", self.exclude)):
            for one in choices:
                if isinstance(one, str) and one not in used:
                    raise ValueError(f"from_flax: {argument} must match a layer, got {one!r}")


def _is_head(path: _Path, layer: Any, tables: set[_Table]) -> bool:
    """Returns True for a layer of the model's output, by its name or its number of outputs."""
    parts = [*map(str, path)]
    block = next((i for i, part in enumerate(parts) if _BLOCK.fullmatch(part)), None)
    features = getattr(layer, "features", getattr(layer, "out_features", None))
    count = math.prod(features) if isinstance(features, tuple) else features
    return any(part in layer_names.HEADS for part in parts[:block]) or any(
        count == size and owner[: len(path) - 1] == path[:-1] for owner, size in tables
    )


def _is_router(parts: list[str]) -> bool:
    """Returns True for a layer of a router, by its name."""
    names = [re.sub(r"_\d+$", "", part) for part in parts]
    if any(layer_names.ROUTERS.fullmatch(n) or layer_names.ROUTER_CLASSES.search(n) for n in names):
        return True
    gate = layer_names.GATES.fullmatch(names[-1])
    return bool(gate) and any(_MOE.search(name) for name in names)


def from_flax(
    model: Any, recipe: Recipe | str | None = None, *, include: Any = None, exclude: Any = None
) -> Any:
    """Makes the layers of a model of plain Flax compute in FP8.

    Of a Linen model these are ``nn.Dense``, ``nn.DenseGeneral`` and ``nn.Einsum``, also inside of
    other modules such as ``nn.MultiHeadDotProductAttention``, unless they have a ``dot_general`` of
    their own. The model returned has the fields, methods and parameters of the given one; its
    class is a subclass. With ``DelayedScaling`` its variables have the collection
    "_overwrite_with_gradient" of FP8 state, which ``TrainState`` replaces by its gradient. Where a
    model has ``nn.scan`` or ``nn.vmap`` of its own, ``variable_axes`` must list the collection.

    Of an nnx model these are ``nnx.Linear``, ``nnx.LinearGeneral`` and ``nnx.Einsum``, which are
    changed in place. ``recipe`` must keep no state.

    Routers and output heads are not converted. Output heads have the name of a head (``lm_head``,
    ``classifier``, ``score``, ...) outside of numbered blocks, or one output for each token of an
    embedding beside them or in a module beside them, which a Linen model has called before. Routers
    are layers called router, or gate inside of modules called moe or experts. ``include`` converts
    them if it names them.

    Args:
        model: an ``nn.Module`` that is not bound, or an ``nnx.Module``.
        recipe: as in ``make_dot_general_cls``; None means ``DelayedScaling()``.
        include: layers to convert: a name or pattern (``*``, ``?``, ``[]``) that successive parts
            of a layer's path match, written with dots, a predicate ``(name, module) -> bool``, or
            several of them; None converts all but routers and output heads.
        exclude: layers not to convert, given as in ``include``; takes precedence over it.

    Returns:
        The model to use.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: no recipe has this name; or a pattern matches no layer, of a Linen model raised
            by ``init``.
        NotImplementedError: the recipe has an option that is not available in JAX, or keeps state
            and ``model`` is an ``nnx.Module``.
    """
    switch = _Switch(
        checked_recipe("from_flax", recipe, "recipe"),
        None if include is None else _choices("include", include),
        () if exclude is None else _choices("exclude", exclude),
    )
    if isinstance(model, nnx.Module):
        return _converted_nnx(model, switch)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"from_flax: model must be a flax.linen.Module or a flax.nnx.Module, got"
            f" {type(model).__name__}"
        )
    given_kind: Any = type(model)
    kind = _switched(given_kind, switch)
    fields = model.__dataclass_fields__.values()
    given = {f.name: getattr(model, f.name) for f in fields if f.init and f.name != "parent"}
    return kind(**given, parent=model.parent)


def _choices(argument: str, choice: Any) -> tuple[Any, ...]:
    """Returns ``include`` or ``exclude`` as a tuple."""
    several = isinstance(choice, Iterable) and not isinstance(choice, str)
    found = tuple(choice) if several else (choice,)
    for one in found:
        if not isinstance(one, str) and not callable(one):
            raise TypeError(
                f"from_flax: {argument} must be names, patterns or predicates, got"
                f" {type(one).__name__}"
            )
    return found


@functools.lru_cache(maxsize=256)
def _switched(kind: Any, switch: _Switch) -> Any:
    """Returns a subclass of a Linen module's class whose public methods compute in FP8."""
    own = [each for each in kind.__mro__ if issubclass(each, nn.Module) and each is not nn.Module]
    names = {name for each in own for name in vars(each)}
    found: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    for name in sorted(names):
        method = inspect.getattr_static(kind, name)
        is_public = not name.startswith("_") and name not in dir(nn.Module)
        wrapped = getattr(method, "method_handler_wrapped", False)
        if inspect.isfunction(method) and wrapped and (is_public or name == "__call__"):
            found[name] = _in_fp8(method, name, switch)
    return type(kind)(kind.__name__, (kind,), found)


def _in_fp8(method: Callable[..., Any], name: str, switch: _Switch) -> Callable[..., Any]:
    """Returns a method that intercepts the layers that it calls."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _active.value == switch:
            return method(self, *args, **kwargs)
        used: set[Any] = set()
        with _active(switch), nn.intercept_methods(_interceptor(switch, used)):
            made = method(self, *args, **kwargs)
        if name == "__call__" and self.is_initializing():
            switch.check(used)
        return made

    return run


def _interceptor(switch: _Switch, used: set[Any]) -> Callable[..., Any]:
    """Returns a function for ``nn.intercept_methods``."""
    dot_general_cls, einsum_cls = _classes(switch.recipe)
    tables: set[_Table] = set()

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        if isinstance(layer, nn.Embed):
            tables.add((layer.path[:-1], layer.num_embeddings))
        is_einsum = type(layer).__call__ is nn.Einsum.__call__
        is_dense = isinstance(layer, (nn.Dense, nn.DenseGeneral)) and not (
            layer.dot_general or layer.dot_general_cls
        )
        if context.method_name != "__call__" or not (is_einsum or is_dense):
            return call(*args, **kwargs)
        if not switch.chooses(layer.path, layer, tables, used):
            return call(*args, **kwargs)
        if is_einsum:
            fields = {f: getattr(layer, f) for f in nn.Einsum.__dataclass_fields__}
            fields |= {"parent": layer.scope, "name": None, "einsum_cls": einsum_cls}
            return _Einsum(**fields)(*args, **kwargs)
        # The layer belongs to this call; a module's own __setattr__ refuses any change.
        object.__setattr__(layer, "dot_general_cls", dot_general_cls)
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(layer, "dot_general_cls", None)

    return intercept


@functools.lru_cache(maxsize=64)
def _classes(recipe: Recipe) -> tuple[Any, Any]:
    """Returns the classes for dense layers and for einsum."""
    return make_dot_general_cls(recipe), make_einsum_cls(recipe)


def _converted_nnx(model: nnx.Module, switch: _Switch) -> nnx.Module:
    """Changes an nnx model's layers and returns it."""
    if isinstance(switch.recipe, DelayedScaling):
        raise NotImplementedError(
            "from_flax: recipe must keep no state (such as CurrentScaling) for a model of flax.nnx,"
            " got DelayedScaling"
        )
    dot_general, einsum = (kind() for kind in _classes(switch.recipe))
    layers = list(nnx.iter_modules(model))
    tables = {(p[:-1], layer.num_embeddings) for p, layer in layers if isinstance(layer, nnx.Embed)}
    used: set[Any] = set()
    for path, layer in layers:
        attribute, plain = "dot_general", jax.lax.dot_general
        if isinstance(layer, nnx.Einsum):
            attribute, plain = "einsum_op", jax.numpy.einsum
        elif not isinstance(layer, (nnx.Linear, nnx.LinearGeneral)):
            continue
        if getattr(layer, attribute) in (None, plain) and switch.chooses(path, layer, tables, used):
            setattr(layer, attribute, einsum if attribute == "einsum_op" else dot_general)
    switch.check(used)
    return model

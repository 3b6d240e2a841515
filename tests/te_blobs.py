"""State of TransformerEngine's modules, saved as each of its releases does."""

import collections
import dataclasses
import enum
import io
import pickle
import sys
import types

import torch

NAMES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


def tensors(gemms=1, slots=(3, 2), length=4):
    """State as TransformerEngine has it after some steps, with a different number everywhere."""
    forward, backward = slots[0] * gemms, slots[1] * gemms
    values = {
        "scale_fwd": 448 / torch.arange(1, forward + 1).float(),
        "amax_history_fwd": torch.arange(length * forward).float().view(length, forward),
        "scale_bwd": 57344 / torch.arange(1, backward + 1).float(),
        "amax_history_bwd": torch.arange(length * backward).float().view(length, backward) + 0.5,
    }
    values["amax_history_fwd"][0] = 0
    values["amax_history_bwd"][0] = 0
    return values


def extra(fp8_max=(448.0, 57344.0)):
    largest = {"fp8_max_fwd": fp8_max[0], "fp8_max_bwd": fp8_max[1]}
    return {"num_gemms": 1, **largest, "async": False, "ids": [1, (2, 3)], "name": "x"}


def as_uint8(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def saved(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream


def recipe_objects(python_311=False):
    """A recipe like TransformerEngine's, of classes that exist only while it is pickled."""
    recipe = types.ModuleType("transformer_engine.common.recipe")
    custom = types.ModuleType("megatron.core.extensions.transformer_engine")
    helper = collections.namedtuple("_FormatHelper", ["max_fwd", "max_bwd"])

    class Format(enum.Enum):
        HYBRID = helper(448, 57344)

        def __reduce_ex__(self, protocol):
            if python_311:
                return getattr, (type(self), self._name_)
            return type(self), (self._value_,)

    @dataclasses.dataclass
    class DelayedScaling:
        margin: int = 0
        fp8_format: enum.Enum = Format.HYBRID
        amax_history_len: int = 1024
        amax_compute_algo: str = "max"

    class TEDelayedScaling(DelayedScaling):
        pass

    for module, kinds in (
        (recipe, (helper, Format, DelayedScaling)),
        (custom, (TEDelayedScaling,)),
    ):
        for kind in kinds:
            kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
            setattr(module, kind.__name__, kind)
    modules = {m.__name__: m for m in (recipe, custom)}
    for name in list(modules):  # pickle imports the packages, too
        parts = name.split(".")
        for n in range(1, len(parts)):
            package = ".".join(parts[:n])
            modules.setdefault(package, types.ModuleType(package))
    return modules, DelayedScaling, TEDelayedScaling


def pickled_with_recipe(values, which=1, python_311=False, protocol=None, margin=0, **others):
    """Release 2.x: a pickled dict in a byte tensor; its classes are gone afterwards."""
    modules, *kinds = recipe_objects(python_311)
    sys.modules.update(modules)
    try:
        recipe = kinds[which - 1](margin=margin)
        state = {"recipe": recipe, **values, "extra_fp8_variables": extra(**others)}
        return as_uint8(pickle.dumps(state, protocol=protocol))
    finally:
        for name in modules:
            del sys.modules[name]


def with_scale_inv(values):
    return values | {
        "scale_inv_fwd": 1 / values["scale_fwd"],
        "scale_inv_bwd": 1 / values["scale_bwd"],
        "extra_fp8_variables": extra(),
    }


def with_buffer(values):
    buffer = {"FWD_AMAX_0": [torch.ones(3)], "FWD_AMAX_1": []}
    return with_scale_inv(values) | {"global_fp8_buffer": buffer, "update_amax_fwd": True}


def v02(values):
    return [*(values[name] for name in NAMES), {"FWD": [torch.ones(2)]}, True, 0, 0, "a", "b"]


FORMS = {
    "2.x": lambda v: pickled_with_recipe(v),
    "2.x, Megatron's class": lambda v: pickled_with_recipe(v, which=2),
    "2.x, enum by name": lambda v: pickled_with_recipe(v, python_311=True),
    "2.x, protocol 5": lambda v: pickled_with_recipe(v, protocol=5),
    "1.x, pickle": lambda v: as_uint8(pickle.dumps(with_scale_inv(v))),
    "1.x, stream": lambda v: saved(with_scale_inv(v)),
    "1.x, stream read before": lambda v: _at_end(saved(with_scale_inv(v))),
    "1.x, old file format": lambda v: saved(
        with_scale_inv(v), _use_new_zipfile_serialization=False
    ),
    "file in a byte tensor": lambda v: as_uint8(saved(with_scale_inv(v)).getvalue()),
    "early 1.x": lambda v: saved(with_buffer(v)),
    "0.x": lambda v: as_uint8(pickle.dumps(with_buffer(v))),
    "0.3": with_buffer,
    "0.2": v02,
}


def _at_end(stream):
    stream.seek(0, io.SEEK_END)
    return stream

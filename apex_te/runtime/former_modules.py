"""Former names of renamed modules, which pickled objects and users' imports may still use."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

# Present names by former ones, without "apex_te."; private ones stand for pickles that name them.
_NOW = {
    "arguments": "fp8.arguments",
    "compatibility.loader": "compatibility.finder",
    "distributed.collectives": "comm.collectives",
    "distributed.expert_parallel": "comm.expert_parallel",
    "distributed.parallel_styles": "distributed.dtensor.parallel_styles",
    "distributed.peer_memory": "comm.peer_memory",
    "distributed.rng": "comm.rng",
    "distributed.dtensor.stacked_rows": "distributed.dtensor.local_parameters",
    "distributed.fsdp.gather_group": "distributed.fsdp.gather_set",
    "distributed.saved_parts": "distributed.checkpoint",
    "fp8.delayed.amax_group": "fp8.delayed.ranks",
    "fp8.delayed.compiled_region": "fp8.delayed.compiled",
    "fp8.delayed.compiled_weight": "fp8.module_fp8",
    "fp8.delayed.first_step": "fp8.delayed.state",
    "fp8.delayed.registry": "fp8.delayed.ranks",
    "integrations._joined_init": "integrations._joined_state",
    "integrations._wrapped_forward": "integrations.autocast_forward",
    "integrations.layer_advice.layer": "integrations.layer_advice.advice",
    "integrations.layer_advice.picture": "integrations.layer_advice.advice",
    "integrations.megatron._layer": "integrations.megatron._config",
    "integrations.megatron.norm": "integrations.megatron.linear",
    "integrations.te_alias.commands": "compatibility.aliases.commands",
    "integrations.te_alias.conflicts": "compatibility.aliases.conflicts",
    "integrations.te_alias.files": "compatibility.aliases.files",
    "integrations.te_alias.finder": "compatibility.aliases.finder",
    "integrations.te_alias.metadata": "compatibility.aliases.metadata",
    "integrations.te_alias.process": "compatibility.aliases.process",
    "integrations.te_alias.status": "compatibility.aliases.commands",
    "integrations.te_alias.version": "compatibility.aliases.metadata",
    "fp8.delayed.scale_formula": "fp8.delayed.state",
    "fp8.formats": "fp8.tensor",
    "gpu_arch": "runtime.device",
    "integrations.t5_norm": "integrations.from_torch",
    "jax.quantizer.block": "jax.quantizer.schemes",
    "jax.quantizer.current": "jax.quantizer.schemes",
    "jax.quantizer.delayed": "jax.quantizer.schemes",
    "jax.quantizer.hif8": "jax.quantizer.schemes",
    "jax.quantizer.mx": "jax.quantizer.schemes",
    "jax.quantizer.per_tensor": "jax.quantizer.schemes",
    "model_init": "fp8.model_init",
    "module._attention_backends": "module.attention.backends",
    "module._core.head_layout": "module._core.heads",
    "module._core.layer_norm_linear_function": "module._core.fused_casts",
    "module._layer_norm_linear_function": "module._core.fused_casts",
    "module._masks": "module.attention.masks",
    "module._parallel_module": "module._core.parallel",
    "module._qkv_heads": "module.attention.qkv_heads",
    "module.attention.gaps": "module.attention.packed",
    "module.attention.qk_norm": "module.attention.multihead",
    "module.dot_product_attention": "module.attention.dot_product",
    "module.fp8_padding": "module.grouped.padding",
    "module.grouped_linear": "module.grouped.linear",
    "module.inference_params": "module.attention.inference_params",
    "module.multihead_attention": "module.attention.multihead",
    "op_builder.jit.archs": "op_builder.jit.backends.archs",
    "op_builder.jit.backends.cuda": "op_builder.jit.backends.library",
    "op_builder.jit.backends.dispatcher": "op_builder.jit.backends.pythons",
    "op_builder.jit.backends.hip": "op_builder.jit.backends.library",
    "op_builder.jit.backends.steps": "op_builder.jit.backends.library",
    "op_builder.jit.build.extension": "op_builder.jit.build.service",
    "op_builder.jit.build_report": "op_builder.jit.prebuild.build_report",
    "op_builder.jit.cache": "op_builder.jit.find.cache",
    "op_builder.jit.find.entry": "op_builder.jit.find.cache",
    "op_builder.jit.find.look_up": "op_builder.jit.find.cache",
    "op_builder.jit.near_names": "op_builder.jit.text",
    "op_builder.jit.prebuild.targets": "op_builder.jit.prebuild.batch",
    "op_builder.jit.prebuild.user_cache": "op_builder.jit.prebuild.batch",
    "op_builder.jit.resources": "op_builder.jit.build.resources",
    "op_builder.jit.service": "op_builder.jit.build.service",
    "op_builder.jit.targets": "op_builder.jit.prebuild.batch",
    "op_builder.jit.toolchain": "op_builder.jit.backends.toolchain",
    "op_builder.jit.user_ops": "op_builder.user_ops",
    "ops.argument_errors": "ops.binding",
    "ops.decoded_gemm": "ops.emulated_gemm",
    "ops.op_function": "ops.binding",
    "ops.product_count": "ops.gemm_common",
    "ops.product_into": "ops.gemm_common",
    "ops.registration": "ops.binding",
    "quantizer": "fp8.scheme",
    "quantizer.base": "fp8.scheme",
    "quantizer.block": "fp8.scheme.block",
    "quantizer.current": "fp8.scheme.current",
    "quantizer.delayed": "fp8.scheme.delayed",
    "quantizer.hif8": "fp8.scheme.hif8",
    "quantizer.mx": "fp8.scheme.mx",
    "runtime.counts": "runtime.named_arguments",
    "runtime.entered": "fp8.autocast",
    "runtime.former_names": "runtime.named_arguments",
    "runtime.gpu_arch": "runtime.device",
    "runtime.lazy": "runtime.imports",
    "runtime.model_argument": "runtime.named_arguments",
    "runtime.paths": "runtime.imports",
    "runtime.torch_version": "runtime.imports",
    "runtime.transfer": "runtime.device",
    "runtime.workspaces": "runtime.device",
    "tensor": "fp8.tensor",
}
_PACKAGE = "apex_te."


class _Loader:
    """Import loader that puts a renamed module into ``sys.modules`` under its former name."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what stands in sys.modules when this returns.
        former = module.__name__[len(_PACKAGE) :]
        # With the modules in a renamed package, which other finders would load a second time.
        for name in (former, *(name for name in _NOW if name.startswith(f"{former}."))):
            sys.modules[_PACKAGE + name] = importlib.import_module(_PACKAGE + _NOW[name])


def find(name: str) -> ModuleSpec | None:
    """Returns an import spec for the former full name of a module; None for any other name."""
    is_former = name.startswith(_PACKAGE) and name[len(_PACKAGE) :] in _NOW
    return ModuleSpec(name, _Loader()) if is_former else None  # type: ignore[arg-type]

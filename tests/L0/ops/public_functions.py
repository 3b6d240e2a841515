"""Every public function of apex_te.ops, found by scanning, with arguments that it takes."""

import importlib
import inspect
import pkgutil
from typing import Any, NamedTuple

import torch

import apex_te.ops
from apex_te.ops import (
    block_quantize,
    cross_entropy,
    grouped_quantize,
    hif8,
    layer_norm,
    moe_permute,
    mx_quantize,
    rms_norm,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# What serves the ops from inside, and the specifications in plain PyTorch.
HELPERS = {
    "argument_errors",
    "fp8_output",
    "gemm_tuning",
    "moe_permute_reference",
    "norm_common",
    "op_function",
    "product_into",
    "reference_codec",
    "registration",
    "transforms",
}
# What takes no tensor, or belongs to a specification, or needs GPUs beside it.
OTHERS = {
    "activation.allocate_fp8",
    "activation.as_matrix",
    "bias_dropout_add.drop_threshold",
    "bias_dropout_add.keep_mask",
    "bias_dropout_add.philox4x32",
    "block_quantize.allocate",
    "block_quantize.scale_shape",
    "dense_gemm.has_dense_fp8",
    "dense_gemm.multiplies",
    "dense_gemm.multiply_into",
    "dense_gemm_swiglu.fuses",
    "dense_gemm_swiglu.gains",
    "fp8_gemm.bound_product",
    "fp8_gemm.tune",
    "grouped_gemm.has_grouped_fp8",
    "grouped_quantize.check_rows",
    "grouped_gemm.multiplies_codes",
    "grouped_gemm.has_grouped_products",
    "multi_tensor.dense",
    "multi_tensor.mark_written",
    "multi_tensor.workspace",
    "peer_exchange.await_rank",
    "peer_exchange.join",
    "peer_exchange.send",
    "peer_exchange.sum_pieces",
    "product_count.add",
    "product_count.fp8_gemm_count",
    "rope.angle_table",
}


def public_functions() -> list[str]:
    """`<op>.<function>` of each, in order."""
    found = []
    for module_info in pkgutil.iter_modules(apex_te.ops.__path__):
        if module_info.name in HELPERS or module_info.name.startswith("_"):
            continue
        module = importlib.import_module(f"apex_te.ops.{module_info.name}")
        for name, value in vars(module).items():
            own = inspect.isfunction(value) and value.__module__ == module.__name__
            if own and not name.startswith(("_", "reference")):
                found.append(f"{module_info.name}.{name}")
    return sorted(found)


class Case(NamedTuple):
    """Arguments of one call; those named in `written` are overwritten by it."""

    args: dict[str, Any]
    written: tuple[str, ...] = ()


def one(value: float = 1.0) -> torch.Tensor:
    return torch.tensor([value])


def matrix(rows: int = 32, cols: int = 64) -> torch.Tensor:
    return torch.randn(rows, cols)


def floats(count: int = 2) -> list[torch.Tensor]:
    return [torch.randn(3, 5) for _ in range(count)]


def scalars(count: int = 2) -> list[torch.Tensor]:
    return [torch.ones(1) for _ in range(count)]


def fp8_output(rows: int = 32, cols: int = 64) -> Any:
    return apex_te.ops.fp8_output.FP8Output(
        torch.zeros(rows, cols, dtype=E4M3), torch.zeros(cols, rows, dtype=E4M3), torch.ones(1)
    )


def block_output(rows: int = 32, cols: int = 64) -> Any:
    return block_quantize.BlockQuantized(
        torch.zeros(rows, cols, dtype=E4M3), torch.ones(block_quantize.scale_shape(rows, cols, 1)),
        torch.zeros(cols, rows, dtype=E4M3), torch.ones(block_quantize.scale_shape(cols, rows, 1)),
    )  # fmt: skip


def mx_output(rows: int = 32, cols: int = 64) -> Any:
    return mx_quantize.MXQuantized(
        *(torch.zeros(shape, dtype=dtype)
          for shape, dtype in [
              ((rows, cols), E4M3), ((rows, cols // 32), torch.float8_e8m0fnu),
              ((cols, rows), E4M3), ((cols, rows // 32), torch.float8_e8m0fnu),
          ])
    )  # fmt: skip


def codes(rows: int = 32, cols: int = 64) -> torch.Tensor:
    return matrix(rows, cols).to(E4M3)


def groups() -> Any:
    return grouped_quantize.groups_of(torch.tensor([16, 16]), 32)


def route() -> Any:
    return moe_permute.make_map(torch.eye(8, dtype=torch.bool)).row_id_map


def norm_case(**more: Any) -> dict[str, Any]:
    return {"x": matrix(), "weight": torch.rand(64), "eps": 1e-5, **more}


def fp8_case(**more: Any) -> dict[str, Any]:
    return {**more, "scale": one(), "fp8_dtype": E4M3, "amax": one(0.0)}


def gemm_case(**more: Any) -> dict[str, Any]:
    return {
        "a": codes(32, 64), "b": codes(16, 64), "a_scale_inv": one(), "b_scale_inv": one(),
        "out": torch.zeros(32, 16), "bias": torch.rand(16), **more,
    }  # fmt: skip


def swiglu_operands(dtype: torch.dtype, columns: int) -> dict[str, Any]:
    return {
        "a": codes(32, 64).view(dtype), "b": codes(columns, 64), "a_scale_inv": one(),
        "b_scale_inv": one(),
    }  # fmt: skip


def narrow_halves() -> dict[str, Any]:
    return {"input": torch.randn(32, 128).bfloat16(), "up": torch.randn(32, 128).bfloat16()}


def block_gemm_case() -> dict[str, Any]:
    a = block_quantize.block_quantize(matrix(32, 64), E4M3, columnwise=False)
    b = block_quantize.block_quantize(matrix(16, 64), E4M3, block_rows=128, columnwise=False)
    return gemm_case(a=a[0], b=b[0], a_scale_inv=a[1], b_scale_inv=b[1])


def mx_gemm_case() -> dict[str, Any]:
    a = mx_quantize.mx_quantize(matrix(32, 64), columnwise=False)
    b = mx_quantize.mx_quantize(matrix(16, 64), columnwise=False)
    return {
        "a": a[0], "b": b[0], "a_scale": a[1], "b_scale": b[1], "out": torch.zeros(32, 16),
        "bias": torch.rand(16),
    }  # fmt: skip


def optimizer_case(**more: Any) -> dict[str, Any]:
    return {
        "params": floats(), "grads": floats(), **more, "lr": 0.1, "masters": floats(),
        "inv_scale": one(), "found_inf": torch.zeros(1),
    }  # fmt: skip


def adam_case() -> dict[str, Any]:
    squares = [torch.rand(3, 5) for _ in range(2)]
    return optimizer_case(exp_avgs=floats(), exp_avg_sqs=squares, step=1)


def make_case(name: str) -> Case:
    """New arguments for a function; AssertionError for one without an entry."""
    x, w = matrix(), torch.rand(64)
    out_pair = {"out_rowwise": torch.zeros(32, 64, dtype=E4M3),
                "out_columnwise": torch.zeros(64, 32, dtype=E4M3)}  # fmt: skip
    hif8_pair = {k: v.view(torch.uint8) for k, v in out_pair.items()}
    layer_out = layer_norm.layer_norm_fwd(x, w, w, 1e-5)
    rms_out = rms_norm.rms_norm_fwd(x, w, 1e-5)
    target, stats = torch.randint(0, 64, (32,)), torch.zeros(32, 2)
    cross_entropy.cross_entropy_fwd(x, target, stats=stats)
    halves = {"input": matrix(), "up": matrix(), "bias": torch.rand(64), "up_bias": torch.rand(64)}
    table = {
        "activation.activation": Case({"x": x, "kind": "silu"}),
        "activation.activation_fwd": Case(
            {"x": x, "kind": "silu", "out": torch.zeros_like(x)}, ("out",)
        ),
        "activation.activation_bwd": Case(
            {"grad_output": matrix(), "x": x, "kind": "silu", "out": torch.zeros_like(x)}, ("out",)
        ),
        "activation.activation_fwd_fp8": Case(
            fp8_case(x=x, kind="silu", out=fp8_output()), ("amax", "out")
        ),
        "activation.activation_bwd_fp8": Case(
            fp8_case(grad_output=matrix(), x=x, kind="silu", out=fp8_output()), ("amax", "out")
        ),
        "amax_scale_update.amax_scale_update": Case(
            {
                "histories": [torch.rand(4, 2), torch.rand(4, 3)],
                "scales": [torch.ones(2), torch.ones(3)],
                "scale_invs": [torch.ones(2), torch.ones(3)],
                "fp8_max": [448.0, 57344.0],
                "margin": 1,
                "nonfinite_count": torch.zeros(1, dtype=torch.int32),
            },
            ("histories", "scales", "scale_invs", "nonfinite_count"),
        ),
        "bias_dropout_add.bias_dropout_add": Case(
            {"x": x, "bias": w, "residual": matrix(), "p": 0.5, "seed": torch.tensor([3])}
        ),
        "bias_dropout_add.bias_dropout_add_bwd": Case(
            {"dout": x, "seed": torch.tensor([3]), "p": 0.5, "x_dtype": torch.float32,
             "bias_dtype": torch.float32}
        ),
        "bias_gelu.bias_gelu": Case({"x": x, "bias": w}),
        "bias_gelu.bias_gelu_fwd": Case(
            {"x": x, "bias": w, "out": torch.zeros_like(x)}, ("out",)
        ),
        "bias_gelu.bias_gelu_bwd": Case(
            {"grad_output": matrix(), "x": x, "bias": w, "with_dbias": True,
             "out": torch.zeros_like(x)}, ("out",),
        ),
        "bias_gelu.bias_gelu_fwd_fp8": Case(
            fp8_case(x=x, bias=w, out=fp8_output()), ("amax", "out")
        ),
        "bias_gelu.bias_gelu_bwd_fp8": Case(
            fp8_case(grad_output=matrix(), x=x, bias=w, with_dbias=True, out=fp8_output()),
            ("amax", "out"),
        ),
        "block_quantize.block_quantize": Case(
            {"x": x, "fp8_dtype": E4M3, "block_rows": 1, "eps": 0.0, "amax": one(0.0),
             "out": block_output()}, ("amax", "out"),
        ),
        "block_quantize.block_dequantize": Case(
            {"fp8_data": codes(), "scale_inv": torch.rand(1, 32), "block_rows": 1,
             "dtype": torch.float32, "out": torch.zeros(32, 64)}, ("out",),
        ),
        "byte_transpose.byte_transpose": Case(
            {"fp8_data": codes(), "out": torch.zeros(64, 32, dtype=E4M3)}, ("out",)
        ),
        "cast_transpose.cast_transpose": Case(
            {"x": x, "scale": one(), "fp8_dtype": E4M3, "amax": one(0.0), "scale_inv": one(),
             "with_dbias": True, "noop": torch.zeros(1, dtype=torch.int32), **out_pair},
            ("amax", "scale_inv", *out_pair),
        ),
        "cross_entropy.cross_entropy": Case(
            {"logits": x, "target": torch.randint(0, 64, (32,)), "ignore_index": -100,
             "label_smoothing": 0.1}
        ),
        "cross_entropy.cross_entropy_fwd": Case(
            {"logits": x, "target": torch.randint(0, 64, (32,)), "grad": torch.zeros_like(x),
             "stats": torch.zeros(32, 2), "num_valid": torch.tensor([32], dtype=torch.int32),
             "ignore_index": -100}, ("grad", "stats"),
        ),
        "cross_entropy.count_valid": Case(
            {"target": torch.randint(0, 64, (32,)), "ignore_index": 3}
        ),
        "cross_entropy.cross_entropy_bwd": Case(
            {"logits": x, "target": target, "stats": stats, "grad_output": one(2.0),
             "grad": torch.zeros_like(x), "num_valid": torch.tensor([32], dtype=torch.int32)},
            ("grad",),
        ),
        "cross_entropy.sum_losses": Case(
            {"loss": torch.rand(32), "num_valid": torch.tensor([32], dtype=torch.int32)}
        ),
        "cross_entropy.scale_gradient": Case(
            {"grad": torch.rand(32, 64), "grad_output": one(2.0), "target": target,
             "num_valid": torch.tensor([32], dtype=torch.int32)},
            ("grad",),
        ),
        "current_scale.current_scale": Case(
            {"x": x, "fp8_dtype": E4M3, "eps": 0.0, "amax": one(), **out_pair}, tuple(out_pair)
        ),
        "current_scale.tensor_amax": Case({"x": x}),
        "current_scale.scale_of": Case(
            {"amax": one(3.0), "fp8_dtype": E4M3, "scale": one(), "scale_inv": one(), "eps": 0.0},
            ("scale", "scale_inv"),
        ),
        "dense_gemm.dense_gemm": Case(
            gemm_case(residual=torch.randn(32, 16).bfloat16()), ("out",)
        ),
        "dense_gemm_swiglu.dense_gemm_swiglu": Case(
            {**swiglu_operands(E4M3, 32), "scale": one(), "bias": torch.randn(32).bfloat16(),
             "amax": one()}, ("amax",),
        ),
        "dense_gemm_swiglu.dense_gemm_swiglu_bwd": Case(
            {**swiglu_operands(E5M2, 16), "hidden": torch.randn(32, 32).bfloat16(),
             "scale": one(), "fp8_dtype": E5M2, "amax": one(), "act_scale": one()}, ("amax",),
        ),
        "emulated_gemm.emulated_fp8_gemm": Case(gemm_case(), ("out",)),
        "emulated_gemm.emulated_block_gemm": Case(block_gemm_case(), ("out",)),
        "emulated_gemm.hif8_gemm": Case(
            gemm_case(a=hif8.encode(matrix(32, 64)), b=hif8.encode(matrix(16, 64))), ("out",)
        ),
        "emulated_gemm.mx_gemm": Case(mx_gemm_case(), ("out",)),
        "fp8_gemm.fp8_gemm": Case(gemm_case(gelu=True), ("out",)),
        "fp8_gemm.block_scaled_gemm": Case(
            {**block_gemm_case(), "a_block_rows": 1, "b_block_rows": 128}, ("out",)
        ),
        "grouped_gemm.multiply_groups": Case(
            {"a": x, "b": torch.randn(2, 16, 64), "groups": groups()}
        ),
        "grouped_gemm.contract_groups": Case(
            {"a": torch.randn(8, 32), "b": torch.randn(32, 16), "groups": groups()}
        ),
        "grouped_gemm.scaled_multiply_groups": Case(
            {"a": codes(), "a_scale_inv": torch.rand(32), "b": torch.randn(2, 16, 64).to(E4M3),
             "b_scale_inv": torch.rand(2), "groups": groups(), "fast": False}
        ),
        "grouped_gemm.scaled_contract_groups": Case(
            {"a": codes(8, 32), "a_scale_inv": torch.rand(2), "b": codes(16, 32),
             "b_scale_inv": torch.rand(2), "ends": torch.tensor([16, 32], dtype=torch.int32),
             "fast": False}
        ),
        "grouped_quantize.groups_of": Case({"splits": torch.tensor([16, 16]), "rows": 32}),
        "grouped_quantize.quantize_groups": Case(
            {"x": x, "groups": groups(), "scale": torch.ones(2), "fp8_dtype": E4M3,
             "amax": torch.zeros(2), "due": torch.ones(2, dtype=torch.int32)}, ("amax",),
        ),
        "grouped_quantize.quantize_matrices": Case(
            {"matrices": [matrix(), matrix()], "scale": torch.ones(2), "fp8_dtype": E4M3,
             "groups": groups(), "amax": torch.zeros(2), "due": torch.ones(2, dtype=torch.int32)},
            ("amax",),
        ),
        "grouped_quantize.scales_of": Case({"amax": torch.rand(2), "fp8_dtype": E4M3, "eps": 0.0}),
        "grouped_quantize.first_scales": Case(
            {"amax": torch.rand(2), "groups": groups(), "due": torch.ones(2, dtype=torch.int32),
             "scale": torch.ones(2), "scale_inv": torch.ones(2), "fp8_max": 448.0, "margin": 0},
            ("due", "scale", "scale_inv"),
        ),
        "grouped_quantize.finish_rows": Case(
            {"out": x, "groups": groups(), "bias": torch.rand(2, 64)}, ("out",)
        ),
        "grouped_quantize.zero_unused": Case(
            {"out": torch.randn(2, 4, 64), "groups": groups()}, ("out",)
        ),
        "grouped_quantize.decode": Case({"fp8_data": codes()}),
        "grouped_quantize.scale_rows": Case({"out": x, "factor": torch.rand(32)}, ("out",)),
        "grouped_quantize.column_sums": Case({"x": x, "groups": groups()}),
        "hif8.encode": Case({"x": x}),
        "hif8.decode": Case(
            {"codes": hif8.encode(x), "dtype": torch.float32, "scale_inv": one(),
             "out": torch.zeros(32, 64)}, ("out",),
        ),
        "hif8.quantize": Case(
            {"x": x, "scale": one(), "amax": one(0.0), **hif8_pair}, ("amax", *hif8_pair)
        ),
        "hif8.quantize_current": Case(
            {"x": x, "target": 15.0, "eps": 0.0, "amax": one(), **hif8_pair}, tuple(hif8_pair)
        ),
        "layer_norm.layer_norm": Case(norm_case(bias=w, residual=matrix())),
        "layer_norm.layer_norm_fwd": Case(norm_case(bias=w, residual=matrix())),
        "layer_norm.layer_norm_fwd_fp8": Case(
            norm_case(bias=w, residual=matrix(), scale_inv=one(), **fp8_case()),
            ("amax", "scale_inv"),
        ),
        "layer_norm.layer_norm_bwd": Case(
            {"dy": matrix(), "x": x, "weight": w, "mean": layer_out.mean, "rstd": layer_out.rstd,
             "d_residual": matrix()}
        ),
        "rms_norm.rms_norm": Case(norm_case(residual=matrix())),
        "rms_norm.rms_norm_fwd": Case(norm_case(residual=matrix())),
        "rms_norm.rms_norm_fwd_fp8": Case(
            norm_case(residual=matrix(), scale_inv=one(), **fp8_case()), ("amax", "scale_inv")
        ),
        "rms_norm.rms_norm_bwd": Case(
            {"dy": matrix(), "x": x, "weight": w, "rstd": rms_out.rstd, "d_residual": matrix()}
        ),
        "moe_permute.make_map": Case(
            {"routing_map": torch.eye(8, dtype=torch.bool), "align_size": 4, "num_rows": 40}
        ),
        "moe_permute.permute": Case(
            {"inp": matrix(8, 16), "row_id_map": route(), "num_rows": 8, "probs": torch.rand(8, 8)}
        ),
        "moe_permute.permute_by": Case(
            {"inp": matrix(8, 16), "routing_map": torch.eye(8, dtype=torch.bool), "num_rows": 32,
             "probs": torch.rand(8, 8), "align_size": 4}
        ),
        "moe_permute.permute_bwd": Case(
            {"grad_permuted": matrix(8, 16), "row_id_map": route(),
             "grad_permuted_probs": torch.rand(8)}
        ),
        "moe_permute.unpermute": Case(
            {"inp": matrix(8, 16), "row_id_map": route(), "probs": torch.rand(8, 8)}
        ),
        "moe_permute.unpermute_bwd": Case(
            {"grad_output": matrix(8, 16), "inp": matrix(8, 16), "row_id_map": route(),
             "probs": torch.rand(8, 8)}
        ),
        "moe_permute.make_chunk_map": Case(
            {"split_sizes": torch.tensor([3, 5]), "sorted_index": torch.tensor([1, 0]),
             "num_rows": 8}
        ),
        "moe_permute.sort_chunks": Case(
            {"inp": matrix(8, 16), "chunk_map": moe_permute.make_chunk_map(
                torch.tensor([3, 5]), torch.tensor([1, 0]), 8), "probs": torch.rand(8)}
        ),
        "multi_tensor.amax": Case({"tensors": floats(), "out": torch.zeros(2)}, ("out",)),
        "multi_tensor.l2norm": Case({"tensors": floats(), "per_tensor": True}),
        "multi_tensor.scale": Case(
            {"inputs": floats(), "outputs": floats(), "factor": 2.0,
             "found_inf": torch.zeros(1)}, ("outputs", "found_inf"),
        ),
        "multi_tensor.axpby": Case(
            {"xs": floats(), "ys": floats(), "outputs": floats(), "a": 2.0, "b": 3.0,
             "found_inf": torch.zeros(1)}, ("outputs", "found_inf"),
        ),
        "multi_tensor.quantize": Case(
            {"tensors": floats(), "scales": scalars(), "amaxes": scalars(),
             "scale_invs": scalars()}, ("amaxes", "scale_invs"),
        ),
        "multi_tensor_optim.adam": Case(
            adam_case(), ("params", "exp_avgs", "exp_avg_sqs", "masters")
        ),
        "multi_tensor_optim.lamb": Case(
            adam_case(), ("params", "exp_avgs", "exp_avg_sqs", "masters")
        ),
        "multi_tensor_optim.sgd": Case(
            optimizer_case(momentums=floats(), momentum=0.9), ("params", "momentums", "masters")
        ),
        "mx_quantize.mx_quantize": Case({"x": x, "out": mx_output()}, ("out",)),
        "mx_quantize.mx_dequantize": Case(
            {"fp8_data": codes(), "scale": mx_quantize.mx_quantize(x)[1], "dtype": torch.float32,
             "out": torch.zeros(32, 64)}, ("out",),
        ),
        "rope.rope": Case({"x": torch.randn(6, 2, 3, 16), "freqs": torch.rand(8, 16),
                           "starts": torch.tensor([0, 1]), "rotary_dim": 16, "start": 0}),
        "qkv_cast.qkv_cast_grad": Case(
            fp8_case(queries=torch.randn(3, 5, 8, 16), keys=torch.randn(3, 5, 2, 16),
                     values=torch.randn(3, 5, 2, 16), interleaved=True, with_dbias=True),
            ("amax",),
        ),
        "qkv_cast.qkv_cast_weight": Case(
            fp8_case(weight=x, repeats=2, groups=2, **out_pair),
            ("amax", "out_rowwise", "out_columnwise"),
        ),
        "scaled_softmax.scaled_softmax": Case(
            {"x": torch.randn(2, 3, 8, 8), "scale": 0.5,
             "mask": torch.zeros(2, 1, 8, 8, dtype=torch.bool)}
        ),
        "scaled_softmax.scaled_softmax_fwd": Case(
            {"x": torch.randn(2, 3, 8, 8), "scale": 0.5,
             "mask": torch.zeros(2, 1, 8, 8, dtype=torch.bool),
             "out": torch.zeros(2, 3, 8, 8)}, ("out",),
        ),
        "scaled_softmax.scaled_softmax_bwd": Case(
            {"dy": torch.randn(2, 3, 8, 8), "y": torch.rand(2, 3, 8, 8), "scale": 0.5,
             "out": torch.zeros(2, 3, 8, 8)}, ("out",),
        ),
        "swiglu.swiglu": Case(halves),
        "swiglu.swiglu_fwd": Case(halves),
        "swiglu.swiglu_fwd_fp8": Case(fp8_case(**halves), ("amax",)),
        "swiglu.swiglu_bwd": Case({"grad_output": matrix(), **halves, "with_dbias": True}),
        "swiglu.swiglu_bwd_fp8": Case(
            fp8_case(grad_output=matrix(), **halves, with_dbias=True), ("amax",)
        ),
        "swiglu_block.swiglu_fwd_block": Case(
            {**narrow_halves(), "fp8_dtype": E4M3, "amax": one(0.0)}, ("amax",)
        ),
        "swiglu_block.swiglu_bwd_block": Case(
            {"grad_output": torch.randn(32, 128).bfloat16(), **narrow_halves(),
             "fp8_dtype": E4M3, "amax": one(0.0)}, ("amax",)
        ),
        "wgrad_gemm.wgrad_gemm": Case(
            {"dy": matrix(32, 16), "x": x, "out": torch.zeros(16, 64), "accumulate": True}, ("out",)
        ),
    }  # fmt: skip
    assert name in table, f"{name} is new: add its arguments here"
    return table[name]


def find(name: str) -> Any:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"apex_te.ops.{module}"), function)


NAMES = [name for name in public_functions() if name not in OTHERS]

"""Every public function of apex_te.ops, found by scanning, with arguments that it takes."""

import functools
import importlib
import inspect
import pkgutil
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import apex_te.ops
from apex_te.ops import (
    block_quantize,
    cross_entropy,
    grouped_cast,
    grouped_quantize,
    hif8,
    layer_norm,
    moe_permute,
    mx_quantize,
    rms_norm,
    row_quantize,
    transducer_loss,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# What serves the ops from inside, and the specifications in plain PyTorch.
HELPERS = {
    "binding",
    "fp8_output",
    "gemm_tuning",
    "moe_permute_reference",
    "norm_common",
    "gemm_common",
    "reference_codec",
    "transforms",
}
ROUTER_OUTPUTS = ("probs", "dense_probs", "routing_map", "scores", "lse", "counts")
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
    "dense_gemm.reads_bias",
    "dense_gemm_swiglu.aligned",
    "dense_gemm_swiglu.fuses",
    "dense_gemm_swiglu.gains",
    "dense_gemm_swiglu.ran",
    "fp8_gemm.bound_product",
    "fp8_gemm.decoded",
    "fp8_gemm.is_taken",
    "fp8_gemm.run_empty",
    "fp8_gemm.tune",
    "grouped_gemm.has_grouped_fp8",
    "grouped_quantize.allocate",
    "grouped_quantize.allocate_blocks",
    "grouped_quantize.check_block_rows",
    "grouped_quantize.block_values_of_columns",
    "grouped_quantize.check_rows",
    "grouped_quantize.lies_transposed",
    "grouped_gemm.multiplies_codes",
    "grouped_gemm.has_grouped_products",
    "multi_tensor.dense",
    "multi_tensor.mark_written",
    "multi_tensor.workspace",
    "multi_tensor_optim.adam_with_casts",
    "multi_tensor_optim.check_kept_scales",
    "multi_tensor_optim.descend",
    "multi_tensor_optim.lamb_update",
    "peer_exchange.await_rank",
    "peer_exchange.join",
    "peer_exchange.send",
    "peer_exchange.sum_pieces",
    "gemm_common.count_gemms",
    "gemm_common.fp8_gemm_count",
    "rope.angle_table",
    "transducer_joint.cells_of",
    "transducer_joint.keep_scale",
    "row_products.row_block_product",
    "row_products.row_product",
    "row_products.row_scaled_product",
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


def matrix(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols)


def floats(rows: int, cols: int) -> list[torch.Tensor]:
    return [torch.randn(3, 5), torch.randn(rows, cols)]


def scalars() -> list[torch.Tensor]:
    return [torch.ones(1) for _ in range(2)]


def fp8_output(rows: int, cols: int) -> Any:
    return apex_te.ops.fp8_output.FP8Output(
        torch.zeros(rows, cols, dtype=E4M3), torch.zeros(cols, rows, dtype=E4M3), torch.ones(1)
    )


def block_output(rows: int, cols: int) -> Any:
    return block_quantize.BlockQuantized(
        torch.zeros(rows, cols, dtype=E4M3), torch.ones(block_quantize.scale_shape(rows, cols, 1)),
        torch.zeros(cols, rows, dtype=E4M3), torch.ones(block_quantize.scale_shape(cols, rows, 1)),
    )  # fmt: skip


def row_output(rows: int, cols: int) -> Any:
    return row_quantize.RowQuantized(
        torch.zeros(rows, cols, dtype=E4M3), torch.ones(rows, 1),
        torch.zeros(cols, rows, dtype=E4M3), torch.ones(cols, 1),
    )  # fmt: skip


def mx_output(rows: int, cols: int) -> Any:
    return mx_quantize.MXQuantized(
        *(torch.zeros(shape, dtype=dtype)
          for shape, dtype in [
              ((rows, cols), E4M3), ((rows, -(-cols // 32)), torch.float8_e8m0fnu),
              ((cols, rows), E4M3), ((cols, -(-rows // 32)), torch.float8_e8m0fnu),
          ])
    )  # fmt: skip


def codes(rows: int, cols: int) -> torch.Tensor:
    return matrix(rows, cols).to(E4M3)


def groups(rows: int) -> Any:
    return grouped_quantize.groups_of(torch.tensor([rows // 2] * 2), rows)


def routing(rows: int) -> torch.Tensor:
    """Each of the tokens goes to one of 8 experts."""
    return torch.arange(rows)[:, None] % 8 == torch.arange(8)


def route(rows: int) -> Any:
    return moe_permute.make_map(routing(rows)).row_id_map


def norm_case(rows: int, cols: int, **more: Any) -> dict[str, Any]:
    residual = matrix(rows, cols)
    return {"x": matrix(rows, cols), "weight": torch.rand(cols), "eps": 1e-5,
            "residual": residual, **more}  # fmt: skip


def norm_bwd_case(module: Any, rows: int, cols: int, *bias: torch.Tensor) -> dict[str, Any]:
    forward = getattr(module, module.__name__.rpartition(".")[2] + "_fwd")
    x, weight = matrix(rows, cols), torch.rand(cols)
    out = forward(x, weight, *bias, 1e-5)
    mean = {"mean": out.mean} if bias else {}
    return {"dy": matrix(rows, cols), "x": x, "weight": weight, **mean, "rstd": out.rstd,
            "d_residual": matrix(rows, cols)}  # fmt: skip


def norm_again_case(
    module: Any, rows: int, cols: int, *bias: torch.Tensor, **more: Any
) -> dict[str, Any]:
    case = norm_bwd_case(module, rows, cols, *bias)
    own = {name: case[name] for name in ("x", "weight", "mean", "rstd") if name in case}
    return {**own, **({"bias": bias[0]} if bias else {}), **more}


def images(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, 2, 3)


def batch_norm_case(rows: int, cols: int, **more: Any) -> dict[str, Any]:
    """Of images with a residual and a ReLU."""
    return {
        "x": images(rows, cols), "mean": torch.randn(cols), "inv_std": torch.rand(cols),
        "weight": torch.rand(cols), "bias": torch.randn(cols), "z": images(rows, cols),
        **more,
    }  # fmt: skip


def loss_case(rows: int, cols: int, **more: Any) -> dict[str, Any]:
    target = torch.randint(0, max(cols, 1), (rows,))
    return {"logits": matrix(rows, cols), "target": target, **more}


def loss_bwd_case(rows: int, cols: int, **more: Any) -> dict[str, Any]:
    case, stats = loss_case(rows, cols), torch.zeros(rows, 2)
    cross_entropy.cross_entropy_fwd(**case, stats=stats)
    return {**case, "stats": stats, "grad_output": one(2.0), "grad": matrix(rows, cols), **more}


def focal_case(rows: int, cols: int) -> dict[str, Any]:
    target = torch.randint(-2, max(cols, 1), (rows,))
    return {"logits": matrix(rows, cols), "target": target, "num_positives": one(3.0)}


def index_mul_case(rows: int, cols: int) -> dict[str, Any]:
    index = torch.randint(0, max(rows, 1), (rows,))
    return {"in1": matrix(rows, cols), "in2": matrix(rows, cols), "index": index}


def joint_case(rows: int, cols: int) -> dict[str, Any]:
    f_len, g_len = torch.tensor([rows, rows // 2]).int(), torch.tensor([3, 5]).int()
    return {"f": torch.randn(2, rows, cols), "g": torch.randn(2, 5, cols), "f_len": f_len,
            "g_len": g_len}  # fmt: skip


def joint_bwd_case(rows: int, cols: int) -> dict[str, Any]:
    lengths = {k: v for k, v in joint_case(rows, cols).items() if k.endswith("len")}
    mask = torch.randint(0, 2, (2, rows, 5, cols), dtype=torch.uint8)
    return {"grad": torch.randn(mask.shape), "mask": mask, **lengths, "batch_offset": None,
            "max_f_len": rows, "max_g_len": 5, "scale": 2.0}  # fmt: skip


def transducer_loss_case() -> dict[str, Any]:
    """Of samples with all frames and labels, so that all of alpha and beta is written."""
    f_len, y_len = torch.full((2,), 5).int(), torch.full((2,), 3).int()
    label = torch.randint(1, 16, (2, 3)).int()
    return {"x": torch.randn(2, 5, 4, 16), "label": label, "f_len": f_len, "y_len": y_len}


def transducer_loss_bwd_case() -> dict[str, Any]:
    case = transducer_loss_case()
    written = {"log_sums": torch.zeros(40), "rest": torch.zeros(2, 2, 5, 4)}
    alpha, beta, _ = transducer_loss.transducer_loss_fwd(**case, **written)
    return {**case, "grad": torch.rand(2), "alpha": alpha, "beta": beta, **written}


def fp8_case(**more: Any) -> dict[str, Any]:
    return {**more, "scale": one(), "fp8_dtype": E4M3, "amax": one(0.0)}


def gemm_case(rows: int, cols: int, **more: Any) -> dict[str, Any]:
    return {
        "a": codes(rows, cols), "b": codes(16, cols), "a_scale_inv": one(), "b_scale_inv": one(),
        "out": torch.zeros(rows, 16), "bias": torch.rand(16), **more,
    }  # fmt: skip


def fused_operands(dtype: torch.dtype, rows: int, cols: int, columns: int) -> dict[str, Any]:
    return {
        "a": codes(rows, cols).view(dtype), "b": codes(columns, cols), "a_scale_inv": one(),
        "b_scale_inv": one(),
    }  # fmt: skip


def narrow(rows: int) -> torch.Tensor:
    return torch.randn(rows, 128).bfloat16()


def block_gemm_case(rows: int, cols: int) -> dict[str, Any]:
    quantize = functools.partial(block_quantize.block_quantize, columnwise=False)
    a, b = quantize(matrix(rows, cols), E4M3), quantize(matrix(16, cols), E4M3, block_rows=128)
    return gemm_case(rows, cols, a=a[0], b=b[0], a_scale_inv=a[1], b_scale_inv=b[1])


def mx_gemm_case(rows: int, cols: int) -> dict[str, Any]:
    a, b = (mx_quantize.mx_quantize(matrix(n, cols), columnwise=False) for n in (rows, 16))
    return {
        "a": a[0], "b": b[0], "a_scale": a[1], "b_scale": b[1], "out": torch.zeros(rows, 16),
        "bias": torch.rand(16),
    }  # fmt: skip


def optimizer_case(rows: int, cols: int, **more: Any) -> dict[str, Any]:
    params, grads, masters = (floats(rows, cols) for _ in range(3))
    return {
        "params": params, "grads": grads, **more, "lr": 0.1, "masters": masters,
        "inv_scale": one(), "found_inf": torch.zeros(1),
    }  # fmt: skip


def pair_case(rows: int, cols: int) -> dict[str, Any]:
    return {"params": floats(rows, cols), "grads": floats(rows, cols), "lr": 0.1,
            "found_inf": torch.zeros(1)}  # fmt: skip


def adam_case(rows: int, cols: int) -> dict[str, Any]:
    squares = [t.abs() for t in floats(rows, cols)]
    return optimizer_case(rows, cols, exp_avgs=floats(rows, cols), exp_avg_sqs=squares, step=1)


def softmax_case(rows: int, cols: int, **more: Any) -> dict[str, Any]:
    mask = torch.arange(rows)[:, None] < torch.arange(cols) - 8
    mask = mask.expand(2, 1, rows, cols).contiguous()
    return {"x": torch.randn(2, 3, rows, cols), "scale": 0.5, "mask": mask, **more}


def make_case(name: str, rows: int = 32, cols: int = 64) -> Case:
    """New arguments for a function; AssertionError for one without an entry.

    Args:
        name: `<op>.<function>`; with `:required` behind it, those that it must have; with
            `:padded`, for a columnwise copy of two rows more that is padded.
        rows: rows of its matrices, tokens or queries, even.
        cols: columns of its matrices, a multiple of 32; ops of heads have sizes of their own.
    """
    name, _, form = name.partition(":")
    if form == "padded":
        case = make_case(name, rows + 2, cols)
        args = {k: v for k, v in case.args.items() if not k.startswith("out")}
        options = {"pad_columnwise", "columnwise"} & inspect.signature(find(name)).parameters.keys()
        args |= dict.fromkeys(options, True)
        return Case(args, tuple(key for key in case.written if key in args))
    x, w, shape = matrix(rows, cols), torch.rand(cols), (rows, cols)
    out_pair = {"out_rowwise": torch.zeros(rows, cols, dtype=E4M3),
                "out_columnwise": torch.zeros(cols, rows, dtype=E4M3)}  # fmt: skip
    hif8_pair = {k: v.view(torch.uint8) for k, v in out_pair.items()}
    halves = {"input": x, "up": matrix(*shape), "bias": w, "up_bias": torch.rand(cols)}
    valid = torch.tensor([rows], dtype=torch.int32)
    due = torch.ones(2, dtype=torch.int32)
    table = {
        "activation.activation": lambda: Case({"x": x, "kind": "silu"}),
        "activation.activation_fwd": lambda: Case(
            {"x": x, "kind": "silu", "out": torch.zeros_like(x)}, ("out",)
        ),
        "activation.activation_bwd": lambda: Case(
            {"grad_output": matrix(*shape), "x": x, "kind": "silu", "out": torch.zeros_like(x)},
            ("out",),
        ),
        "activation.activation_fwd_fp8": lambda: Case(
            fp8_case(x=x, kind="silu", out=fp8_output(*shape)), ("amax", "out")
        ),
        "activation.activation_bwd_fp8": lambda: Case(
            fp8_case(grad_output=matrix(*shape), x=x, kind="silu", out=fp8_output(*shape)),
            ("amax", "out"),
        ),
        "amax_scale_update.amax_scale_update": lambda: Case(
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
        "attention_sink.attention_sink_fwd": lambda: Case(
            {"values": torch.randn(2, 3, *shape), "lse": torch.randn(2, 3, rows),
             "sink": torch.randn(3), "out": torch.zeros(2, 3, *shape)}, ("out",),
        ),
        "attention_sink.attention_sink_bwd": lambda: Case(
            {"dout": torch.randn(2, 3, *shape), "out": torch.randn(2, 3, *shape),
             "total": torch.rand(2, 3, rows), "sink": torch.randn(3)}
        ),
        "attention_sink.attention_join": lambda: Case(
            {"values": torch.randn(2, 3, *shape), "lse": torch.randn(2, 3, rows),
             "part": torch.randn(2, 3, *shape), "part_lse": torch.randn(2, 3, rows),
             "part2": torch.randn(2, 3, *shape)[:, :, :1],
             "part2_lse": torch.randn(2, 3, rows)[..., :1],
             "out": torch.zeros(2, 3, *shape)}, ("out",),
        ),
        "batch_norm.batch_norm_stats": lambda: Case({"x": images(rows, cols)}),
        "batch_norm.batch_norm_combine": lambda: Case(
            {"means": x, "vars": torch.rand(shape), "counts": torch.arange(rows).int(),
             "running_mean": torch.zeros(cols), "running_var": torch.ones(cols)},
            ("running_mean", "running_var"),
        ),
        "batch_norm.batch_norm_fwd": lambda: Case(batch_norm_case(*shape, relu=True)),
        "batch_norm.batch_norm_reduce": lambda: Case(
            batch_norm_case(*shape, dy=images(rows, cols), relu=True)
        ),
        "batch_norm.batch_norm_bwd": lambda: Case(
            batch_norm_case(
                *shape, dy=images(rows, cols), sum_dy=torch.randn(cols), relu=True,
                sum_dy_xmu=torch.randn(cols), counts=torch.tensor([6, 2 * rows]).int(),
                with_dz=True,
            )
        ),
        "batch_norm.batch_norm_relu_bwd": lambda: Case(
            batch_norm_case(*shape, dy=images(rows, cols))
        ),
        "batch_norm.batch_norm_train_fwd": lambda: Case(
            {"x": images(rows, cols), "weight": torch.rand(cols), "bias": torch.randn(cols),
             "z": images(rows, cols), "relu": True, "running_mean": torch.zeros(cols),
             "running_var": torch.ones(cols)},
            ("running_mean", "running_var"),
        ),
        "batch_norm.batch_norm_train_bwd": lambda: Case(
            batch_norm_case(*shape, dy=images(rows, cols), relu=True, with_dz=True)
        ),
        "bias_dropout_add.bias_dropout_add": lambda: Case(
            {"x": x, "bias": w, "residual": matrix(*shape), "p": 0.5, "seed": torch.tensor([3])}
        ),
        "bias_dropout_add.bias_dropout_add_bwd": lambda: Case(
            {"dout": x, "seed": torch.tensor([3]), "p": 0.5, "x_dtype": torch.float32,
             "bias_dtype": torch.float32}
        ),
        "bias_gelu.bias_gelu": lambda: Case({"x": x, "bias": w}),
        "bias_gelu.bias_gelu_fwd": lambda: Case(
            {"x": x, "bias": w, "out": torch.zeros_like(x)}, ("out",)
        ),
        "bias_gelu.bias_gelu_bwd": lambda: Case(
            {"grad_output": matrix(*shape), "x": x, "bias": w, "with_dbias": True,
             "out": torch.zeros_like(x)}, ("out",),
        ),
        "bias_gelu.bias_gelu_fwd_fp8": lambda: Case(
            fp8_case(x=x, bias=w, out=fp8_output(*shape)), ("amax", "out")
        ),
        "bias_gelu.bias_gelu_bwd_fp8": lambda: Case(
            fp8_case(grad_output=matrix(*shape), x=x, bias=w, with_dbias=True,
                     out=fp8_output(*shape)),
            ("amax", "out"),
        ),
        "block_quantize.block_quantize": lambda: Case(
            {"x": x, "fp8_dtype": E4M3, "block_rows": 1, "eps": 0.0, "amax": one(0.0),
             "out": block_output(*shape)}, ("amax", "out"),
        ),
        "block_quantize.block_dequantize": lambda: Case(
            {"fp8_data": codes(*shape), "block_rows": 1, "dtype": torch.float32,
             "scale_inv": torch.rand(block_quantize.scale_shape(*shape, 1)),
             "out": torch.zeros(shape)}, ("out",),
        ),
        "byte_transpose.byte_transpose": lambda: Case(
            {"fp8_data": codes(*shape), "out": torch.zeros(cols, rows, dtype=E4M3)}, ("out",)
        ),
        "cast_transpose.cast_transpose": lambda: Case(
            {"x": x, "scale": one(), "fp8_dtype": E4M3, "amax": one(0.0), "scale_inv": one(),
             "with_dbias": True, "noop": torch.zeros(1, dtype=torch.int32), **out_pair},
            ("amax", "scale_inv", *out_pair),
        ),
        "cross_entropy.cross_entropy": lambda: Case(
            loss_case(*shape, ignore_index=-100, label_smoothing=0.1)
        ),
        "cross_entropy.cross_entropy_fwd": lambda: Case(
            loss_case(*shape, grad=torch.zeros_like(x), stats=torch.zeros(rows, 2),
                      num_valid=valid, ignore_index=-100),
            ("grad", "stats"),
        ),
        "cross_entropy.count_valid": lambda: Case(
            {"target": loss_case(*shape)["target"], "ignore_index": 3}
        ),
        "cross_entropy.cross_entropy_bwd": lambda: Case(
            loss_bwd_case(*shape, num_valid=valid), ("grad",)
        ),
        "cross_entropy.sum_losses": lambda: Case(
            {"loss": torch.rand(rows), "num_valid": valid}
        ),
        "cross_entropy.scale_gradient": lambda: Case(
            {"grad": torch.rand(rows, cols), "grad_output": one(2.0),
             "target": loss_case(*shape)["target"], "num_valid": valid},
            ("grad",),
        ),
        "current_scale.current_scale": lambda: Case(
            {"x": x, "fp8_dtype": E4M3, "eps": 0.0, "amax": one(), **out_pair}, tuple(out_pair)
        ),
        "current_scale.tensor_amax": lambda: Case({"x": x}),
        "current_scale.scale_of": lambda: Case(
            {"amax": one(3.0), "fp8_dtype": E4M3, "scale": one(), "scale_inv": one(), "eps": 0.0},
            ("scale", "scale_inv"),
        ),
        "dense_gemm.dense_gemm": lambda: Case(
            gemm_case(*shape, residual=torch.randn(rows, 16).bfloat16()), ("out",)
        ),
        "dense_gemm_gelu.dense_gemm_gelu": lambda: Case(
            {**fused_operands(E4M3, *shape, 16), "scale": one(),
             "bias": torch.randn(16).bfloat16(), "amax": one()}, ("amax",),
        ),
        "dense_gemm_gelu.dense_gemm_gelu_bwd": lambda: Case(
            {**fused_operands(E5M2, *shape, 16), "hidden": torch.randn(rows, 16).bfloat16(),
             "scale": one(), "fp8_dtype": E5M2, "amax": one(), "act_scale": one(),
             "with_dbias": True}, ("amax",),
        ),
        "dense_gemm_swiglu.dense_gemm_swiglu": lambda: Case(
            {**fused_operands(E4M3, *shape, 32), "scale": one(),
             "bias": torch.randn(32).bfloat16(), "amax": one()}, ("amax",),
        ),
        "dense_gemm_swiglu.dense_gemm_swiglu_held": lambda: Case(
            {**fused_operands(E4M3, *shape, 256), "scale": one(),
             "bias": torch.randn(256).bfloat16(), "amax": one()}, ("amax",),
        ),
        "dense_gemm_swiglu.dense_gemm_swiglu_bwd": lambda: Case(
            {**fused_operands(E5M2, *shape, 16), "hidden": torch.randn(rows, 32).bfloat16(),
             "scale": one(), "fp8_dtype": E5M2, "amax": one(), "act_scale": one()}, ("amax",),
        ),
        "emulated_gemm.emulated_fp8_gemm": lambda: Case(gemm_case(*shape), ("out",)),
        "emulated_gemm.emulated_block_gemm": lambda: Case(block_gemm_case(*shape), ("out",)),
        "emulated_gemm.hif8_gemm": lambda: Case(
            gemm_case(*shape, a=hif8.encode(x), b=hif8.encode(matrix(16, cols))), ("out",)
        ),
        "emulated_gemm.mx_gemm": lambda: Case(mx_gemm_case(*shape), ("out",)),
        "focal_loss.focal_loss": lambda: Case(focal_case(*shape)),
        "focal_loss.focal_loss_fwd": lambda: Case(focal_case(*shape)),
        "focal_loss.focal_loss_bwd": lambda: Case(
            {**focal_case(*shape), "grad_output": one(2.0)}
        ),
        "focal_loss.focal_loss_scale": lambda: Case(
            {"grad": x, "grad_output": one(2.0), "num_positives": one(3.0)}, ("grad",)
        ),
        "fp8_gemm.fp8_gemm": lambda: Case(gemm_case(*shape, gelu=True), ("out",)),
        "fp8_gemm.block_scaled_gemm": lambda: Case(
            {**block_gemm_case(*shape), "a_block_rows": 1, "b_block_rows": 128}, ("out",)
        ),
        "rowwise_gemm.rowwise_gemm": lambda: Case(
            gemm_case(*shape, a_scale_inv=torch.rand(rows, 1), b_scale_inv=torch.rand(16, 1)),
            ("out",),
        ),
        "row_quantize.row_quantize": lambda: Case(
            {"x": x, "fp8_dtype": E4M3, "column_scale": torch.rand(cols), "eps": 0.0,
             "out": row_output(*shape)}, ("out",),
        ),
        "grouped_gemm.multiply_groups": lambda: Case(
            {"a": x, "b": torch.randn(2, 16, cols), "groups": groups(rows)}
        ),
        "grouped_gemm.contract_groups": lambda: Case(
            {"a": torch.randn(8, rows), "b": torch.randn(rows, 16), "groups": groups(rows)}
        ),
        "grouped_gemm.scaled_multiply_groups": lambda: Case(
            {"a": codes(*shape), "a_scale_inv": torch.rand(rows),
             "b": torch.randn(2, 16, cols).to(E4M3), "b_scale_inv": torch.rand(2),
             "groups": groups(rows), "fast": False}
        ),
        "grouped_gemm.scaled_contract_groups": lambda: Case(
            {"a": codes(8, rows), "a_scale_inv": torch.rand(2), "b": codes(16, rows),
             "b_scale_inv": torch.rand(2), "fast": False,
             "ends": torch.tensor([rows // 2, rows], dtype=torch.int32)}
        ),
        "grouped_gemm.block_multiply_groups": lambda: Case(
            {"a": codes(*shape), "a_scale_inv": torch.rand(block_quantize.scale_shape(*shape, 1)),
             "b": torch.randn(2, 16, cols).to(E4M3),
             "b_scale_inv": torch.rand(2, *block_quantize.scale_shape(16, cols, 128)),
             "groups": groups(rows)}
        ),
        "grouped_gemm.block_contract_groups": lambda: Case(
            {"a": codes(8, groups(rows).columns), "b": codes(16, groups(rows).columns),
             "a_scale_inv": torch.rand(groups(rows).lines, 8),
             "b_scale_inv": torch.rand(groups(rows).lines, 16), "groups": groups(rows)}
        ),
        "grouped_cast.quantize_source": lambda: Case(
            {"source": grouped_cast.GatedGradient(
                x, matrix(rows, 2 * cols), torch.rand(rows), bias=matrix(2, 2 * cols)),
             "groups": groups(rows), "scale": torch.ones(2), "fp8_dtype": E4M3,
             "amax": torch.zeros(2), "factor_grad": torch.zeros(rows),
             "bias_grad": matrix(2, 2 * cols)}, ("amax", "factor_grad", "bias_grad"),
        ),
        "grouped_cast.block_quantize_source": lambda: Case(
            {"source": grouped_cast.Gather(x, torch.arange(rows, dtype=torch.int32).flip(0)),
             "groups": groups(rows), "fp8_dtype": E4M3}
        ),
        "grouped_quantize.block_quantize_groups": lambda: Case(
            {"x": x, "groups": groups(rows), "fp8_dtype": E4M3}
        ),
        "grouped_quantize.block_quantize_matrices": lambda: Case(
            {"matrices": [x, matrix(*shape)], "fp8_dtype": E4M3, "groups": groups(rows)}
        ),
        "grouped_quantize.groups_of": lambda: Case(
            {"splits": torch.tensor([rows // 2] * 2), "rows": rows}
        ),
        "grouped_quantize.quantize_groups": lambda: Case(
            {"x": x, "groups": groups(rows), "scale": torch.ones(2), "fp8_dtype": E4M3,
             "amax": torch.zeros(2), "due": due}, ("amax",),
        ),
        "grouped_quantize.quantize_matrices": lambda: Case(
            {"matrices": [x, matrix(*shape)], "scale": torch.ones(2), "fp8_dtype": E4M3,
             "groups": groups(rows), "amax": torch.zeros(2), "due": due},
            ("amax",),
        ),
        "grouped_quantize.scales_of": lambda: Case(
            {"amax": torch.rand(2), "fp8_dtype": E4M3, "eps": 0.0}
        ),
        "grouped_quantize.first_scales": lambda: Case(
            {"amax": torch.rand(2), "groups": groups(rows), "due": due,
             "scale": torch.ones(2), "scale_inv": torch.ones(2), "fp8_max": 448.0, "margin": 0},
            ("due", "scale", "scale_inv"),
        ),
        "grouped_quantize.finish_rows": lambda: Case(
            {"out": x, "groups": groups(rows), "bias": torch.rand(2, cols)}, ("out",)
        ),
        "grouped_quantize.zero_unused": lambda: Case(
            {"out": torch.randn(2, 4, cols), "groups": groups(rows)}, ("out",)
        ),
        "grouped_quantize.decode": lambda: Case({"fp8_data": codes(*shape)}),
        "grouped_quantize.scale_rows": lambda: Case(
            {"out": x, "factor": torch.rand(rows)}, ("out",)
        ),
        "grouped_quantize.column_sums": lambda: Case({"x": x, "groups": groups(rows)}),
        "hif8.encode": lambda: Case({"x": x}),
        "hif8.decode": lambda: Case(
            {"fp8_data": hif8.encode(x), "dtype": torch.float32, "scale_inv": one(),
             "out": torch.zeros(shape)}, ("out",),
        ),
        "hif8.quantize": lambda: Case(
            {"x": x, "scale": one(), "amax": one(0.0), **hif8_pair}, ("amax", *hif8_pair)
        ),
        "hif8.quantize_current": lambda: Case(
            {"x": x, "target": 15.0, "eps": 0.0, "amax": one(), **hif8_pair}, tuple(hif8_pair)
        ),
        "index_mul_2d.index_mul_2d": lambda: Case(index_mul_case(*shape)),
        "index_mul_2d.index_mul_2d_fwd": lambda: Case(
            {**index_mul_case(*shape), "more1": matrix(*shape), "more2": matrix(*shape),
             "out": torch.zeros(shape)}, ("out",)
        ),
        "index_mul_2d.index_mul_2d_bwd": lambda: Case(
            {"dout": x, **index_mul_case(*shape), "din1": matrix(*shape),
             "out": torch.zeros(shape)}, ("din1", "out"),
        ),
        "layer_norm.layer_norm": lambda: Case(norm_case(*shape, bias=w)),
        "layer_norm.layer_norm_fwd": lambda: Case(norm_case(*shape, bias=w)),
        "layer_norm.layer_norm_fwd_fp8": lambda: Case(
            norm_case(*shape, bias=w, scale_inv=one(), **fp8_case()),
            ("amax", "scale_inv"),
        ),
        "layer_norm.layer_norm_again": lambda: Case(
            norm_again_case(layer_norm, *shape, torch.rand(cols))
        ),
        "layer_norm.layer_norm_again_fp8": lambda: Case(
            norm_again_case(layer_norm, *shape, torch.rand(cols), **fp8_case()), ("amax",)
        ),
        "layer_norm.layer_norm_bwd": lambda: Case(
            norm_bwd_case(layer_norm, *shape, torch.rand(cols))
        ),
        "rms_norm.rms_norm": lambda: Case(norm_case(*shape)),
        "rms_norm.rms_norm_fwd": lambda: Case(norm_case(*shape)),
        "rms_norm.rms_norm_fwd_fp8": lambda: Case(
            norm_case(*shape, scale_inv=one(), **fp8_case()), ("amax", "scale_inv")
        ),
        "rms_norm.rms_norm_again": lambda: Case(norm_again_case(rms_norm, *shape)),
        "rms_norm.rms_norm_again_fp8": lambda: Case(
            norm_again_case(rms_norm, *shape, **fp8_case()), ("amax",)
        ),
        "rms_norm.rms_norm_bwd": lambda: Case(
            norm_bwd_case(rms_norm, *shape)
        ),
        "moe_permute.make_map": lambda: Case(
            {"routing_map": routing(rows), "align_size": 4, "num_rows": rows + 32}
        ),
        "moe_permute.permute": lambda: Case(
            {"inp": x, "row_id_map": route(rows), "num_rows": rows, "probs": torch.rand(rows, 8)}
        ),
        "moe_permute.permute_by": lambda: Case(
            {"inp": x, "routing_map": routing(rows), "num_rows": rows + 24,
             "probs": torch.rand(rows, 8), "align_size": 4}
        ),
        "moe_permute.permute_bwd": lambda: Case(
            {"grad_permuted": x, "row_id_map": route(rows), "grad_permuted_probs": torch.rand(rows)}
        ),
        "moe_permute.tokens_of_rows": lambda: Case(
            {"row_id_map": route(rows), "num_rows": rows + 24, "probs": torch.rand(rows, 8)}
        ),
        "moe_permute.unpermute": lambda: Case(
            {"inp": x, "row_id_map": route(rows), "probs": torch.rand(rows, 8)}
        ),
        "moe_permute.unpermute_bwd": lambda: Case(
            {"grad_output": matrix(*shape), "inp": x, "row_id_map": route(rows),
             "probs": torch.rand(rows, 8)}
        ),
        "moe_permute.make_chunk_map": lambda: Case(
            {"split_sizes": torch.tensor([rows // 4, rows - rows // 4]),
             "sorted_index": torch.tensor([1, 0]), "num_rows": rows}
        ),
        "moe_permute.gather_rows": lambda: Case(
            {"inp": x, "rows": torch.arange(rows + 1, dtype=torch.int32)}
        ),
        "moe_permute.sort_chunks": lambda: Case(
            {"inp": x, "chunk_map": moe_permute.make_chunk_map(
                torch.tensor([rows // 4, rows - rows // 4]), torch.tensor([1, 0]), rows),
             "probs": torch.rand(rows)}
        ),
        "moe_router.moe_router_fwd": lambda: Case(
            {"logits": x, "top_k": 4, "score_function": "sigmoid", "outputs": ROUTER_OUTPUTS,
             "num_groups": 4, "group_topk": 2, "expert_bias": torch.rand(cols), "sequences": 2}
        ),
        "moe_router.moe_router_bwd": lambda: Case(
            {"logits": x, "index": torch.argsort(x, descending=True)[:, :4].int(),
             "score_function": "sigmoid", "grad_probs": matrix(rows, min(4, cols)),
             "grad_dense_probs": matrix(*shape), "grad_scores": matrix(*shape),
             "grad_lse": torch.rand(rows)}
        ),
        "multi_tensor.amax": lambda: Case(
            {"tensors": floats(*shape), "out": torch.zeros(2)}, ("out",)
        ),
        "multi_tensor.l2norm": lambda: Case({"tensors": floats(*shape), "per_tensor": True}),
        "multi_tensor.scale": lambda: Case(
            {"inputs": floats(*shape), "outputs": floats(*shape), "factor": 2.0,
             "found_inf": torch.zeros(1)}, ("outputs", "found_inf"),
        ),
        "multi_tensor.axpby": lambda: Case(
            {"xs": floats(*shape), "ys": floats(*shape), "outputs": floats(*shape), "a": 2.0,
             "b": 3.0, "found_inf": torch.zeros(1)}, ("outputs", "found_inf"),
        ),
        "multi_tensor.quantize": lambda: Case(
            {"tensors": floats(*shape), "scales": scalars(), "amaxes": scalars(),
             "scale_invs": scalars()}, ("amaxes", "scale_invs"),
        ),
        "multi_tensor_optim.adam": lambda: Case(
            adam_case(*shape), ("params", "exp_avgs", "exp_avg_sqs", "masters")
        ),
        "multi_tensor_optim.adagrad": lambda: Case(
            {**pair_case(*shape), "sums": [t.abs() for t in floats(*shape)]}, ("params", "sums")
        ),
        "multi_tensor_optim.lamb": lambda: Case(
            adam_case(*shape), ("params", "exp_avgs", "exp_avg_sqs", "masters")
        ),
        "multi_tensor_optim.lars": lambda: Case(
            {**pair_case(*shape), "momentums": floats(*shape), "masters": floats(*shape),
             "grad_norms": torch.rand(2), "param_norms": torch.rand(2), "momentum": 0.9},
            ("params", "momentums", "masters"),
        ),
        "multi_tensor_optim.novograd": lambda: Case(
            {**pair_case(*shape), "exp_avgs": floats(*shape), "norms": torch.rand(2), "step": 1},
            ("params", "exp_avgs"),
        ),
        "multi_tensor_optim.sgd": lambda: Case(
            optimizer_case(*shape, momentums=floats(*shape), momentum=0.9),
            ("params", "momentums", "masters"),
        ),
        "mx_quantize.mx_quantize": lambda: Case({"x": x, "out": mx_output(*shape)}, ("out",)),
        "mx_quantize.mx_dequantize": lambda: Case(
            {"fp8_data": codes(*shape), "scale": mx_quantize.mx_quantize(x)[1],
             "dtype": torch.float32, "out": torch.zeros(shape)}, ("out",),
        ),
        "rope.rope": lambda: Case(
            {"x": torch.randn(rows, 2, 3, 16), "freqs": torch.rand(rows + 2, 16),
             "starts": torch.tensor([0, 1]), "rotary_dim": 16, "start": 0}
        ),
        "qkv_cast.qkv_cast_grad": lambda: Case(
            fp8_case(queries=torch.randn(rows, 5, 8, 16), keys=torch.randn(rows, 5, 2, 16),
                     values=torch.randn(rows, 5, 2, 16), interleaved=True, with_dbias=True),
            ("amax",),
        ),
        "qkv_cast.qkv_cast_weight": lambda: Case(
            fp8_case(weight=x, repeats=2, groups=2, **out_pair),
            ("amax", "out_rowwise", "out_columnwise"),
        ),
        "scaled_softmax.scaled_softmax": lambda: Case(
            softmax_case(*shape)
        ),
        "scaled_softmax.scaled_softmax_fwd": lambda: Case(
            softmax_case(*shape, out=torch.zeros(2, 3, *shape)), ("out",)
        ),
        "scaled_softmax.scaled_softmax_bwd": lambda: Case(
            {"dy": torch.randn(2, 3, *shape), "y": torch.rand(2, 3, *shape), "scale": 0.5,
             "out": torch.zeros(2, 3, *shape)}, ("out",),
        ),
        "swiglu.swiglu": lambda: Case(halves),
        "swiglu.swiglu_fwd": lambda: Case(halves),
        "swiglu.swiglu_fwd_fp8": lambda: Case(fp8_case(**halves), ("amax",)),
        "swiglu.swiglu_bwd": lambda: Case(
            {"grad_output": matrix(*shape), **halves, "with_dbias": True}
        ),
        "swiglu.swiglu_bwd_fp8": lambda: Case(
            fp8_case(grad_output=matrix(*shape), **halves, with_dbias=True), ("amax",)
        ),
        "swiglu_block.swiglu_fwd_block": lambda: Case(
            {"input": narrow(rows), "up": narrow(rows), "fp8_dtype": E4M3, "amax": one(0.0)},
            ("amax",),
        ),
        "swiglu_block.swiglu_bwd_block": lambda: Case(
            {"grad_output": narrow(rows), "input": narrow(rows), "up": narrow(rows),
             "fp8_dtype": E4M3, "amax": one(0.0)}, ("amax",)
        ),
        "transducer_joint.transducer_joint": lambda: Case(
            {**joint_case(rows, cols), "relu": True, "p": 0.5, "seed": torch.tensor([3])}
        ),
        "transducer_joint.transducer_joint_fwd": lambda: Case(
            {**joint_case(rows, cols), "relu": True, "p": 0.5, "seed": torch.tensor([3])}
        ),
        "transducer_joint.transducer_joint_bwd": lambda: Case(joint_bwd_case(rows, cols)),
        "transducer_loss.transducer_loss": lambda: Case(transducer_loss_case()),
        "transducer_loss.transducer_loss_fwd": lambda: Case(
            {**transducer_loss_case(), "log_sums": torch.zeros(40),
             "rest": torch.zeros(2, 2, 5, 4)}, ("log_sums", "rest"),
        ),
        "transducer_loss.transducer_loss_bwd": lambda: Case(transducer_loss_bwd_case()),
        "wgrad_gemm.wgrad_gemm": lambda: Case(
            {"dy": matrix(rows, 16), "x": x, "out": torch.zeros(16, cols), "accumulate": True},
            ("out",),
        ),
    }  # fmt: skip
    assert name in table, f"{name} is new: add its arguments here"
    case = table[name]()
    if not form:
        return case
    parameters = inspect.signature(find(name)).parameters
    args = {k: v for k, v in case.args.items() if parameters[k].default is inspect.Parameter.empty}
    if name == "swiglu.swiglu_bwd":
        args["input"] = matrix(rows, 2 * cols)  # both halves
    return Case(args, tuple(key for key in case.written if key in args))


def find(name: str) -> Any:
    module, _, function = name.partition(":")[0].partition(".")
    return getattr(importlib.import_module(f"apex_te.ops.{module}"), function)


NAMES = [name for name in public_functions() if name not in OTHERS]
# Where other ops run, or inputs have another form, without the arguments that may be left out.
SHORT_FORMS = [
    f"{name}:required"
    for name in (
        "bias_gelu.bias_gelu_bwd", "block_quantize.block_quantize", "cast_transpose.cast_transpose",
        "current_scale.current_scale", "hif8.quantize_current", "layer_norm.layer_norm",
        "rms_norm.rms_norm", "scaled_softmax.scaled_softmax", "swiglu.swiglu", "swiglu.swiglu_bwd",
        "swiglu.swiglu_fwd",
    )
]  # fmt: skip
FORMS = [*NAMES, *SHORT_FORMS]
PADDED_FORMS = [
    f"{name}:padded"
    for name in NAMES
    if "pad_columnwise" in inspect.signature(find(name)).parameters
]
# What autograd differentiates.
DIFFERENTIABLE = {
    "activation.activation",
    "bias_dropout_add.bias_dropout_add",
    "bias_gelu.bias_gelu",
    "cross_entropy.cross_entropy",
    "focal_loss.focal_loss",
    "index_mul_2d.index_mul_2d",
    "layer_norm.layer_norm",
    "rms_norm.rms_norm",
    "rope.rope",
    "scaled_softmax.scaled_softmax",
    "swiglu.swiglu",
    "transducer_joint.transducer_joint",
    "transducer_loss.transducer_loss",
}

# Indices of the outputs that each leaves partly unwritten.
UNFILLED = {
    "grouped_cast.block_quantize_source": (1, 2),  # columns behind those of the groups
    "grouped_cast.quantize_source": (1,),
    "grouped_quantize.block_quantize_groups": (1, 2),
    "grouped_quantize.quantize_groups": (1,),
    "moe_permute.make_map": (0,),  # experts that a token does not go to
    "moe_permute.permute_by": (2,),
}

# Arguments of the dtype of x, where they are float32.
LIKE_X = {
    "bias", "d_residual", "din1", "dout", "dy", "f", "g", "grad", "grad_dense_probs", "grad_output",
    "grad_permuted", "in1", "in2", "inp", "input", "keys", "logits", "more1", "more2", "out",
    "part", "part2", "queries", "residual", "up", "up_bias", "values", "weight", "x", "y", "z",
}  # fmt: skip
# Functions of float32 alone, or whose arguments of these names have dtypes of their own.
ONLY_FLOAT32 = {
    "block_quantize.block_dequantize",
    "cross_entropy.cross_entropy_bwd",
    "cross_entropy.scale_gradient",
    "focal_loss.focal_loss_bwd",
    "focal_loss.focal_loss_scale",
    "hif8.decode",
    "multi_tensor.amax",
    "mx_quantize.mx_dequantize",
}


def in_dtype(name: str, args: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments with x and those of its dtype in another one."""
    if name in ONLY_FLOAT32:
        return args
    return {
        key: value.to(dtype)
        if key in LIKE_X and isinstance(value, torch.Tensor) and value.dtype is torch.float32
        else value
        for key, value in args.items()
    }


class Call:
    """A function of tensors only: what it returns, and what it writes."""

    def __init__(self, name: str, device: Any = "cpu", rows: int = 32, cols: int = 64) -> None:
        self.name = name
        case = make_case(name, rows, cols)
        self.written = case.written
        args = tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, case.args)
        leaves, self.spec = tree_flatten(args)
        self.is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self.rest = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def fresh(self) -> list[torch.Tensor]:
        return [t.clone() for t in self.tensors]

    def arguments(self, tensors: Any) -> dict[str, Any]:
        """The keyword arguments with these tensors in the place of its own."""
        given, rest = iter(tensors), iter(self.rest)
        leaves = [next(given) if is_tensor else next(rest) for is_tensor in self.is_tensor]
        return tree_unflatten(leaves, self.spec)

    def results(self, result: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The tensors returned, then those written."""
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        return (*outputs, *tree_leaves([kwargs[name] for name in self.written]))

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        kwargs = self.arguments(tensors)
        return self.results(find(self.name)(**kwargs), kwargs)

    def filled(self, results: tuple[Any, ...]) -> list[Any]:
        """The results without what has no value."""
        return [t for i, t in enumerate(results) if i not in UNFILLED.get(self.name, ())]

    @functools.cached_property
    def expected(self) -> tuple[Any, ...]:
        return self(*self.fresh())

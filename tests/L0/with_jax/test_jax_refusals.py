"""Input that torch refuses is refused while JAX traces, by the same error in the same words."""

import pytest
import torch

pytest.importorskip("jax")
from arrays import refused, to_arrays

from apex_te import ops as torch_ops
from apex_te.jax import ops

E4M3 = torch.float8_e4m3fn
Z = torch.zeros
X, W, ONE = Z(4, 32), Z(32), torch.ones(1)
WORD = Z(1, dtype=torch.int32)


def given(*args, **options):
    """One call's arguments."""
    return args, options


def changed(good, *changes):
    """Calls with the arguments ``good`` but for some."""
    return [given(**good | change) for change in changes]


S = (2, 3, 4, 4)
X4, TABLE = Z(4, 2, 3, 8), Z(4, 8)
LOGITS, TARGET = Z(4, 8), Z(4, dtype=torch.int32)
SEED = Z(2, dtype=torch.int32)
ROUTES = torch.ones(5, 3, dtype=torch.int32)
ROW_MAP, TOKENS = torch_ops.moe_permute.make_map(ROUTES).row_id_map, Z(5, 8)
SPLITS, GROUPS = torch.tensor([7, 0, 20, 5], dtype=torch.int32), "groups"  # of SPLITS in 40 rows
ROWS, SCALES = Z(40, 8), torch.ones(4)
DATA = Z(4, 32, dtype=torch.uint8)
GATED = {"input": Z(4, 8), "up": None, "scale": ONE, "fp8_dtype": E4M3}
HEADS = {"queries": Z(3, 5, 4, 6), "keys": Z(3, 5, 2, 6), "values": Z(3, 5, 2, 6)}
JOINED = {**HEADS, "interleaved": True, "scale": ONE, "fp8_dtype": E4M3}
WEIGHT = {"weight": Z(8, 4), "repeats": 2, "groups": 2, "scale": ONE, "fp8_dtype": E4M3}
BLOCK = {"input": Z(4, 256).bfloat16(), "up": None, "fp8_dtype": E4M3}
SGD = {"params": [Z(3)], "grads": [Z(3)], "lr": 0.1}
ADAM = {**SGD, "exp_avgs": [Z(3)], "exp_avg_sqs": [Z(3)], "step": 1}
HALF = Z(1).half()
# By module and function.
CALLS = {
    "rms_norm.rms_norm_fwd": [
        given(X.int(), W, 1e-5),
        given(Z(2, 3, 4), W, 1e-5),
        given(X, Z(31), 1e-5),
        given(X, W.int(), 1e-5),
    ],
    "rms_norm.rms_norm_bwd": [given(Z(4, 31), X, W, Z(4)), given(X, X, W, Z(5))],
    "layer_norm.layer_norm_fwd": [given(X, W, Z(30), 1e-5)],
    "activation.activation_fwd": [given(X, "swash")],
    "activation.activation_fwd_fp8": [given(Z(()), "gelu")],
    "cast_transpose.cast_transpose": [
        given(X.int(), ONE, E4M3),
        given(X, Z(2), E4M3),
        given(X, ONE.int(), E4M3),
    ],
    "swiglu.swiglu_fwd": [given(X.int())],
    "swiglu.swiglu_fwd_fp8": changed(
        GATED,
        {"input": Z(4, 7)},
        {"input": Z(2, 2, 7)},
        {"input": torch.tensor(1.0)},
        {"input": Z(4, 8, dtype=torch.int32)},
        {"up": Z(4, 4)},
        {"up": Z(4, 8).half()},
        {"bias": Z(7)},
        {"bias": Z(8).half()},
        {"up_bias": Z(4)},
        {"bias": Z(8), "up_bias": Z(4)},
        {"bias": Z(4), "up_bias": Z(3)},
        {"scale": Z(2)},
        {"scale": HALF},
        {"amax": Z(3)},
        {"activation": "tanh"},
    ),
    "swiglu.swiglu_bwd_fp8": changed(
        GATED, {"grad_output": Z(4, 5)}, {"grad_output": Z(4, 4).half()}
    ),
    "swiglu_block.swiglu_fwd_block": changed(
        BLOCK,
        {"input": Z(4, 7).half()},
        {"input": torch.tensor(1.0)},
        {"input": Z(4, 8, dtype=torch.int32)},
        {"up": Z(4, 4).bfloat16()},
        {"up": Z(4, 256).half()},
        {"bias": Z(7).bfloat16()},
        {"bias": Z(256)},
        {"bias": Z(256).bfloat16(), "up_bias": Z(128).bfloat16()},
        {"activation": "tanh"},
    ),
    "swiglu_block.swiglu_bwd_block": changed(
        BLOCK,
        {"grad_output": Z(4, 128).bfloat16(), "activation": "tanh"},
        {"grad_output": Z(4, 5).bfloat16()},
        {"grad_output": Z(4, 128).half()},
    ),
    "qkv_cast.qkv_cast_grad": changed(
        JOINED,
        {"queries": Z(3, 5, 3, 6)},
        {"queries": Z(3, 5, 0, 6)},
        {"queries": Z(3, 4, 4, 6)},
        {"queries": Z(3, 5, 4, 6).half()},
        {"keys": Z(5, 6)},
        {"keys": Z(3, 5, 2, 6).int(), "values": Z(3, 5, 2, 6).int()},
        {"values": Z(3, 5, 2, 7)},
        {"values": Z(5, 2, 6)},
        {"values": Z(3, 5, 2, 6).half()},
        {"scale": Z(2)},
    ),
    "qkv_cast.qkv_cast_weight": changed(
        WEIGHT,
        {"weight": Z(9, 4)},
        {"weight": Z(8)},
        {"weight": Z(8, 4).int()},
        {"repeats": -1},
        {"groups": 0},
        {"scale": HALF},
    ),
    "mx_quantize.mx_quantize": [
        given(X.int()),
        given(X[0]),
        given(X, rounding="down"),
        given(X, rowwise=False, columnwise=False),
    ],
    "hif8.encode": [given(X.int())],
    "hif8.decode": [given(X), given(DATA, torch.int32)],
    "hif8.quantize": [given(X, Z(2)), given(X[0], ONE)],
    "hif8.quantize_current": [given(X.int()), given(X, 0.0), given(X, eps=-1.0)],
    "emulated_gemm.mx_gemm": [given(DATA, DATA[:, :16], ONE, ONE)],
    "emulated_gemm.hif8_gemm": [given(DATA, DATA[:, :16], ONE, ONE)],
    "scaled_softmax.scaled_softmax": [
        given(Z(S, dtype=torch.int32), 0.5, None),
        given(Z(4, 4), 0.5, None),
        given(Z(2, 3, 4, 5), 0.5, None, causal="upper_left"),
        given(Z(S), 0.5, None, causal="lower_left"),
        given(Z(S), 0.5, Z(S, dtype=torch.uint8)),
        given(Z(S), 0.5, Z(4, 4, dtype=torch.bool)),
        given(Z(S), 0.5, Z(2, 2, 4, 4, dtype=torch.bool)),
    ],
    "scaled_softmax.scaled_softmax_bwd": [
        given(x, Z(2, 3), 0.5) for x in (Z(S, dtype=torch.int32), Z(4, 4), Z(2, 3, 4, 5), Z(S))
    ],
    "rope.rope": [
        given(X4, freqs=TABLE, layout="hbsd"),
        given(X4.int(), freqs=TABLE),
        given(X4[0], freqs=TABLE),
        given(X4, freqs=TABLE, rotary_dim=3),
        given(X4, freqs=TABLE, rotary_dim=10),
        given(Z(1, 1, 1, 8194), freqs=Z(1, 8194)),
        given(X4),
        given(X4, freqs=TABLE, cos=TABLE, sin=TABLE),
        given(X4, cos=TABLE),
        given(X4, freqs=TABLE.int()),
        given(X4, freqs=TABLE[0], rotary_dim=8),
        given(X4, freqs=TABLE, rotary_dim=4),
        given(X4, cos=TABLE, sin=TABLE[:, :4]),
        given(X4, freqs=TABLE, layout="thd"),
        given(X4[0], freqs=TABLE, layout="thd"),
        given(X4, freqs=TABLE, cu_seqlens=SEED),
        given(X4[0], freqs=TABLE, layout="thd", cu_seqlens=Z(2)),
        given(X4[0], freqs=TABLE, layout="thd", cu_seqlens=SEED[:0]),
        given(X4, freqs=TABLE, starts=Z(3, dtype=torch.int32)),
        given(X4, freqs=TABLE, starts=Z(2)),
        given(X4, freqs=TABLE, start=-1),
        given(X4, freqs=TABLE, start=1),
    ],
    "cross_entropy.cross_entropy": [
        given(LOGITS, TARGET[:3]),
        given(LOGITS, TARGET, reduction="median"),
        given(LOGITS, TARGET, label_smoothing=1.5),
        given(LOGITS.int(), TARGET),
        given(LOGITS, TARGET.to(torch.uint8)),
        given(LOGITS, TARGET.to(torch.uint8), reduction="sum"),
        given(LOGITS[:, :0], TARGET),
    ],
    "bias_gelu.bias_gelu": [
        given(LOGITS.int(), Z(8)),
        given(LOGITS, Z(8).half()),
        given(LOGITS, Z(7)),
        given(LOGITS, form="sine"),
    ],
    "bias_gelu.bias_gelu_bwd": [given(LOGITS[:3], LOGITS)],
    "bias_dropout_add.bias_dropout_add": [
        given(LOGITS.int(), None, LOGITS, 0.5, seed=SEED),
        given(LOGITS, Z(7), LOGITS, 0.5, seed=SEED),
        given(LOGITS, None, LOGITS[:3], 0.5, seed=SEED),
        given(LOGITS, None, LOGITS, 1.5, seed=SEED),
        given(LOGITS.half(), None, LOGITS.bfloat16(), 0.0, seed=SEED),
        given(LOGITS, Z(8).half(), LOGITS, 0.0, seed=SEED),
        given(LOGITS[0, 0], None, LOGITS[0, 0], 0.5, seed=SEED),
        given(LOGITS, None, LOGITS, 0.5, True, seed=WORD),
    ],
    "moe_permute.make_map": [
        given(ROUTES[0]),
        given(ROUTES.float()),
        given(ROUTES, map_type="list"),
        given(ROUTES, map_type="index", align_size=4),
        given(ROUTES, map_type="index", num_experts=0),
        given(ROUTES, map_type="index", num_experts=1025),
        given(ROUTES[:, :0]),
        given(ROUTES, align_size=0),
    ],
    "moe_permute.permute": [
        given(TOKENS[0], ROW_MAP, 4),
        given(TOKENS[:4], ROW_MAP, 4),
        given(TOKENS, ROW_MAP.float(), 4),
        given(TOKENS, ROW_MAP, -1),
        given(TOKENS, ROW_MAP[:1], 4),
        given(TOKENS, ROW_MAP, 4, TOKENS),
        given(TOKENS, ROW_MAP, 4, Z(5, 3).half()),
    ],
    "moe_permute.tokens_of_rows": [given(ROW_MAP, -1)],
    "moe_permute.unpermute": [given(TOKENS, ROW_MAP, TOKENS)],
    "moe_permute.make_chunk_map": [given(TOKENS, ROUTES[0], 4)],
    "grouped_quantize.groups_of": [
        given(SCALES, 4),
        given(SPLITS[None], 4),
        given(SPLITS[:0], 4),
        given(Z(1024).int(), 4),
        given(SPLITS, -1),
    ],
    "grouped_quantize.quantize_groups": [
        given(ROWS[0], GROUPS, SCALES, E4M3),
        given(ROWS[:4], GROUPS, SCALES, E4M3),
        given(ROWS.int(), GROUPS, SCALES, E4M3),
        given(ROWS, GROUPS, SCALES[:3], E4M3),
        given(ROWS, GROUPS, SCALES.half(), E4M3),
    ],
    "grouped_gemm.multiply_groups": [
        given(ROWS, ROWS, GROUPS),
        given(ROWS, Z(4, 3, 7), GROUPS),
        given(ROWS[:3], Z(4, 3, 8), GROUPS),
    ],
    "grouped_gemm.contract_groups": [given(ROWS, ROWS[:3], GROUPS)],
    "grouped_gemm.scaled_contract_groups": [given(*[SCALES] * 5, True)],
    "multi_tensor_optim.adam": changed(
        ADAM,
        {"grads": []},
        {"exp_avgs": [Z(3), Z(3)]},
        {"masters": [Z(3), Z(3)]},
        {"params": [Z(3).int()]},
        {"grads": [Z(4)]},
        {"exp_avg_sqs": [Z(3).half()]},
        {"masters": [Z(3).half()]},
        {"betas": (1.0, 0.9)},
        {"step": 0},
        {"lr": HALF},
        {"step": HALF},
        {"inv_scale": HALF},
        {"found_inf": HALF},
    ),
    "multi_tensor_optim.lamb": changed(
        ADAM, {"max_grad_norm": 1.0, "grad_norm": HALF}, {"betas": (0.9, -0.5)}
    ),
    "multi_tensor_optim.sgd": changed(
        SGD, {"momentum": 0.9}, {"momentums": [Z(3).half()], "momentum": 0.9}
    ),
}


@pytest.mark.parametrize(
    ("name", "args", "options"), [(name, *call) for name in CALLS for call in CALLS[name]]
)
def test_the_error_is_torchs(name, args, options):
    owner, _, function = name.partition(".")

    def of(module, convert):
        groups = module.grouped_quantize.groups_of(convert(SPLITS), 40)
        filled = [groups if a is GROUPS else convert(a) for a in args]
        named = {key: convert(value) for key, value in options.items()}
        return lambda: getattr(getattr(module, owner), function)(*filled, **named)

    refused(of(ops, to_arrays), of(torch_ops, lambda value: value))


def test_arguments_that_torch_takes_otherwise():
    jnp = pytest.importorskip("jax.numpy")
    for factor, text in [
        (None, "factor must be a jax.Array, got NoneType"),
        (jnp.ones(39), r"factor must have shape \[40\], got \[39\]"),
    ]:
        groups = ops.grouped_quantize.groups_of(jnp.asarray(SPLITS.numpy()), 40)
        source = ops.grouped_cast.Gated(jnp.zeros((40, 64)), factor)
        scales = ops.grouped_cast.GroupScales(jnp.ones(4))
        with pytest.raises((TypeError, ValueError), match=text):
            ops.grouped_cast.cast_source(source, groups, jnp.float8_e4m3fn, scales)
    with pytest.raises(TypeError, match="num_rows must be an int, got float"):
        ops.moe_permute.tokens_of_rows(jnp.asarray(ROW_MAP.numpy()), 2.5)

"""Mistakes in calls of modules, optimizers, amp and the functions around them, and their errors."""

import functools

import numpy as np
import pytest
import torch

import apex_te
from apex_te import amp, optimizers
from apex_te.distributed import clip_grad_norm_

X = torch.randn(4, 16)  # [tokens, features]
H = torch.randn(6, 2, 16)  # [s, b, hidden]
Q = torch.randn(6, 2, 2, 8)  # [s, b, heads, size]
T = torch.randn(12, 2, 8)  # [t, heads, size]
META = torch.device("meta")


def linear(**options):
    return apex_te.Linear(16, 32, **options)


def norm_linear(**options):
    return apex_te.LayerNormLinear(16, 32, **options)


def mlp(**options):
    return apex_te.LayerNormMLP(16, 32, **options)


def grouped(**options):
    return apex_te.GroupedLinear(2, 16, 32, **options)


def core(**options):
    return apex_te.DotProductAttention(2, 8, **options)


def packed(cu, **options):
    kind = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
    return core(**kind)(T, T, T, cu_seqlens_q=cu, **options)


def attention(**options):
    return apex_te.MultiheadAttention(16, 2, **options)


def cross(memory):
    module = attention(attention_type="cross", attn_mask_type="no_mask")
    return module(H, None, memory)


def layer(**options):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **options}
    return apex_te.TransformerLayer(16, 32, 2, **options)


def decoder(**options):
    return layer(layer_type="decoder")(H, encoder_output=H, **options)


def angles(dim=8):
    return apex_te.RotaryPositionEmbedding(dim)


def cache(*sizes):
    return apex_te.InferenceParams(*sizes or (2, 8))


def int32(*values, device=None):
    return torch.tensor(values, dtype=torch.int32, device=device)


def in_fp8(module, *args):
    with apex_te.fp8_autocast():
        return module(*args)


def backward_twice(module):
    loss = in_fp8(module, X).sum()
    loss.backward()
    loss.backward()


def params():
    return [torch.nn.Parameter(torch.ones(4))]


def adam(**options):
    return optimizers.FusedAdam(params(), **options)


def stepped():
    optimizer = adam()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
    optimizer.step()
    return optimizer


def step_at(rate):
    optimizer = stepped()
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


def step_of_meta():
    model = linear(device=META)
    optimizer = optimizers.FusedAdam(model.parameters())
    model.reset_parameters()
    model(X.to(model.weight.device)).sum().backward()
    optimizer.step()


def with_grouped(**group):
    return optimizers.FusedAdam([{"params": params(), **group}])


def in_two_groups():
    (param,) = params()
    return optimizers.FusedSGD([{"params": [param]}, {"params": [param]}], lr=0.1)


def prepared(**options):
    model = torch.nn.Linear(16, 4)
    return amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), **{"verbosity": 0, **options}
    )


def scaled(loss, optimizer=None, **options):
    model, own = prepared()
    loss = model(X).sum() if loss == "loss" else loss
    with amp.scale_loss(loss, own if optimizer is None else optimizer, **options):
        pass


def graphed(*args, **options):
    return apex_te.make_graphed_callables(*args, **options)


def sizes_of(name, make, *argument_names):
    """Returns the mistakes of a size, for each of the arguments."""
    wrong = [(-3, ValueError, "at least 1, got -3"), (0, ValueError, "at least 1, got 0"),
             (4.0, TypeError, "an int, got float"), ("16", TypeError, "an int, got str"),
             (None, TypeError, "an int, got NoneType")]  # fmt: skip
    return [
        (functools.partial(make, argument, value), error, f"{name}: {argument} must be.*{text}")
        for argument in argument_names
        for value, error, text in wrong
    ]


def resized(cls, *names):
    """Returns a function that makes a module of sizes of 16, one of them replaced."""
    return lambda argument, value: cls(**{**dict.fromkeys(names, 16), argument: value})


def inputs_of(name, call, argument):
    """Returns the mistakes of an input [..., 16] of float32."""
    tensor, other = "must be a torch.Tensor, got ", ValueError
    wrong = [
        (X.numpy(), TypeError, f"{tensor}ndarray; torch.as_tensor"),
        ([[1.0] * 16], TypeError, f"{tensor}list; torch.as_tensor"),
        (None, TypeError, f"{tensor}None"),
        (torch.nn.Identity(), TypeError, f"{tensor}Identity"),
        (H.to(META), other, "must be on cpu like the parameters, got meta"),
        (H.long(), TypeError, "dtype of the parameters .*float32, got torch.int64"),
        (H + 0j, TypeError, "got torch.complex64"),
        (H > 0, TypeError, "got torch.bool"),
        (H[..., :8], other, r"(dimension of 16|\[..., 16\]), got \[.*2, 8\]"),
    ]
    if name != "GroupedLinear":  # which counts its rows first
        wrong.append((H[0, 0, 0], other, r"got \[\]"))
    return [
        (functools.partial(call, x), error, f"{name}: {argument} .*{text}")
        for x, error, text in wrong
    ]


def in_fp8_too(name, make, *args):
    """Returns those mistakes made in FP8."""
    return inputs_of(name, lambda x: in_fp8(make(), x, *args), "inp")


def shared_of(name, make):
    """Returns the mistakes of the arguments that all parallel modules have."""
    wrong = [
        ("sequence_parallel", 1, TypeError, "a bool, got int"),
        ("tp_group", object(), TypeError, "a torch.distributed.ProcessGroup, got object"),
        ("get_rng_state_tracker", 3, TypeError, "a callable"),
        ("tp_size", 0, ValueError, "at least 1, got 0"),
    ]
    return [
        (functools.partial(make, **{argument: value}), error, f"{name}: {argument} must be.*{text}")
        for argument, value, error, text in wrong
    ] + [
        (lambda: make().set_tensor_parallel_group(object()), TypeError,
         f"{name}: tp_group must be a torch.distributed.ProcessGroup")
    ]  # fmt: skip


def two_dtypes_of(name, make):
    call = functools.partial(make, dtype=torch.half, params_dtype=torch.float)
    return [(call, ValueError, f"{name}: dtype must equal params_dtype")]


SHARED = [
    *two_dtypes_of("Linear", linear),
    *two_dtypes_of("LayerNormLinear", norm_linear),
    *two_dtypes_of("LayerNormMLP", mlp),
    *two_dtypes_of("GroupedLinear", grouped),
    *shared_of("Linear", linear),
    *shared_of("LayerNormLinear", norm_linear),
    *shared_of("LayerNormMLP", mlp),
    *shared_of("GroupedLinear", grouped),
    *shared_of("MultiheadAttention", attention),
    *shared_of("TransformerLayer", layer),
    (lambda: apex_te.Linear(4, 4, parallel_mode="Row", tp_size=3), ValueError,
     "Linear: in_features must be a multiple of"),
    (lambda: grouped(tp_size=2, parallel_mode="row"), ValueError,
     "GroupedLinear: bias must be False with weights split"),
    (lambda: grouped(parallel_mode="rows"), ValueError,
     "GroupedLinear: parallel_mode must be None, 'column' or"),
    (lambda: norm_linear(parallel_mode="row"), ValueError,
     "LayerNormLinear: parallel_mode must be None or 'column'"),
    (lambda: norm_linear(parallel_mode="both"), ValueError,
     "LayerNormLinear: parallel_mode must be.*got 'both'"),
    (lambda: norm_linear(normalization="BatchNorm"), ValueError,
     "LayerNormLinear: normalization must be one of LayerNorm, RMSNorm.*got 'BatchNorm'"),
    (lambda: mlp(normalization="BatchNorm"), ValueError,
     "LayerNormMLP: normalization must be one of LayerNorm, RMSNorm.*got 'BatchNorm'"),
    (lambda: mlp(set_parallel_mode=1), TypeError,
     "LayerNormMLP: set_parallel_mode must be a bool.*got int"),
    (lambda: attention(tp_size=2.5, set_parallel_mode=True), TypeError,
     "MultiheadAttention: tp_size must be an int"),
    (lambda: attention(tp_size=3, set_parallel_mode=True), ValueError,
     "MultiheadAttention: .*must be a multiple of the 3"),
    (lambda: apex_te.MultiheadAttention(32, 5), ValueError,
     "MultiheadAttention: num_attention_heads must divide hidden_size=32.*got 5"),
    (lambda: cross(None), ValueError,
     "MultiheadAttention: encoder_output must be given in cross attention"),
    (lambda: attention()(H, None, H), ValueError,
     "MultiheadAttention: encoder_output must be given in cross attention"),
    (lambda: grouped()(X, [4]), ValueError,
     r"GroupedLinear: m_splits must be 2 counts of rows.*got \[4\]"),
    (lambda: grouped()(X, torch.tensor([2.0, 2.0])), TypeError,
     "GroupedLinear: m_splits must be int32 or int64.*got torch.float32"),
]  # fmt: skip

SIZES = [
    *sizes_of("Linear", resized(apex_te.Linear, "in_features", "out_features"),
               "in_features", "out_features"),
    *sizes_of("LayerNormLinear", resized(apex_te.LayerNormLinear, "in_features", "out_features"),
               "in_features"),
    *sizes_of("LayerNormMLP", resized(apex_te.LayerNormMLP, "hidden_size", "ffn_hidden_size"),
               "hidden_size", "ffn_hidden_size"),
    *sizes_of("GroupedLinear",
               resized(apex_te.GroupedLinear, "num_gemms", "in_features", "out_features"),
               "num_gemms", "out_features"),
    *sizes_of("MultiheadAttention",
               resized(apex_te.MultiheadAttention, "hidden_size", "num_attention_heads"),
               "hidden_size", "num_attention_heads"),
    *sizes_of("TransformerLayer",
               resized(apex_te.TransformerLayer, "hidden_size", "ffn_hidden_size",
                       "num_attention_heads"), "hidden_size", "ffn_hidden_size"),
    *sizes_of("InferenceParams",
               resized(apex_te.InferenceParams, "max_batch_size", "max_sequence_length"),
               "max_batch_size", "max_sequence_length"),
    *sizes_of("RotaryPositionEmbedding", resized(apex_te.RotaryPositionEmbedding, "dim"), "dim"),
    *sizes_of("Fp8Padding", resized(apex_te.Fp8Padding, "num_gemms"), "num_gemms"),
]  # fmt: skip

INPUTS = [
    *inputs_of("Linear", lambda x: linear()(x), "inp"),
    *inputs_of("LayerNormLinear", lambda x: norm_linear()(x), "inp"),
    *inputs_of("LayerNormMLP", lambda x: mlp()(x), "inp"),
    *in_fp8_too("Linear", linear),
    *in_fp8_too("LayerNormLinear", norm_linear),
    *in_fp8_too("LayerNormMLP", mlp),
    *in_fp8_too("GroupedLinear", grouped, [1, 1]),
    *inputs_of("LayerNorm", lambda x: apex_te.LayerNorm(16)(x), "inp"),
    *inputs_of("RMSNorm", lambda x: apex_te.RMSNorm(16)(x), "inp"),
    *inputs_of("GroupedLinear", lambda x: grouped()(x, [1, 1]), "inp"),
    *inputs_of("MultiheadAttention", lambda x: attention()(x), "hidden_states"),
    *inputs_of("TransformerLayer", lambda x: layer()(x), "hidden_states"),
]

WORDS = [
    (lambda: linear(activation="gelu"), TypeError,
     "Linear: unexpected argument 'activation'.*the arguments are in_features, out_features, bias"),
    (lambda: apex_te.Linear(in_feature=16, out_features=8), TypeError,
     r"Linear: unexpected argument 'in_feature'.*did you mean 'in_features'\?"),
    (lambda: apex_te.LayerNorm(16, epsilon=1e-5), TypeError,
     r"LayerNorm: unexpected argument 'epsilon'.*did you mean 'eps'\?"),
    (lambda: attention(dropout=0.1), TypeError,
     "MultiheadAttention: unexpected argument 'dropout'.*mean 'attention_dropout'"),
    (lambda: layer(attn_mask_type="causal"), TypeError,
     "TransformerLayer: unexpected argument 'attn_mask_type'.*mean 'self_attn_mask_type'"),
    (lambda: apex_te.GroupedLinear(num_gemm=2, in_features=16, out_features=16), TypeError,
     "GroupedLinear: unexpected argument 'num_gemm'.*mean 'num_gemms'"),
    (lambda: apex_te.Fp8Padding(2, align=16), TypeError,
     "Fp8Padding: unexpected argument 'align'.*mean 'align_size'"),
    (lambda: apex_te.RotaryPositionEmbedding(8, base=1e4), TypeError,
     "RotaryPositionEmbedding: unexpected argument 'base'.*mean 'rotary_base'"),
    (lambda: apex_te.TransformerLayer(16, 32), TypeError,
     "TransformerLayer: num_attention_heads must be given.*got nothing"),
    (lambda: apex_te.Linear(), TypeError,
     "Linear: in_features and out_features must be given.*got nothing"),
    (lambda: apex_te.Linear(16, 32, in_features=16), TypeError,
     "Linear: in_features must be given once.*by position and by name"),
    (lambda: apex_te.Linear(16, 32, True, False), TypeError,
     "Linear: at most 3 arguments may be given by position.*got 4"),
    (lambda: layer(attn_input_format="bhsd"), ValueError,
     r"TransformerLayer: attn_input_format must be.*got 'bhsd'; did you mean 'bshd'\?"),
    (lambda: layer(activation="swigl"), ValueError,
     r"TransformerLayer: activation must be.*got 'swigl'; did you mean 'swiglu'\?"),
    (lambda: mlp(activation=torch.nn.GELU()), ValueError,
     r"LayerNormMLP: activation must be.*got GELU\("),
    (lambda: layer(normalization="rmsnorm"), ValueError,
     r"TransformerLayer: normalization must be.*did you mean 'RMSNorm'\?"),
    (lambda: attention(normalization="rms"), ValueError,
     r"MultiheadAttention: normalization must be.*did you mean 'RMSNorm'\?"),
    (lambda: core(attn_mask_type="casual"), ValueError,
     r"DotProductAttention: attn_mask_type must be.*did you mean 'causal'\?"),
    (lambda: layer(self_attn_mask_type="casual"), ValueError,
     r"TransformerLayer: self_attn_mask_type must be.*did you mean 'causal'\?"),
    (lambda: layer(layer_type="decoder", enc_dec_attn_mask_type="pading"), ValueError,
     r"TransformerLayer: enc_dec_attn_mask_type must be.*did you mean 'padding'\?"),
    (lambda: layer()(H, self_attn_mask_type="casual"), ValueError,
     r"TransformerLayer: self_attn_mask_type must be.*did you mean 'causal'\?"),
    (lambda: decoder(enc_dec_attn_mask_type="pading"), ValueError,
     r"TransformerLayer: enc_dec_attn_mask_type must be.*did you mean 'padding'\?"),
    (lambda: layer(layer_type="decodr"), ValueError,
     r"TransformerLayer: layer_type must be.*did you mean 'decoder'\?"),
    (lambda: attention(attention_type="cros"), ValueError,
     r"MultiheadAttention: attention_type must be.*did you mean 'cross'\?"),
    (lambda: layer(qk_norm_type="L2Norm"), ValueError,
     r"TransformerLayer: qk_norm_type must be.*did you mean 'L2Normalization'\?"),
    (lambda: core()(Q, Q, Q, core_attention_bias_type="alibbi"), ValueError,
     r"DotProductAttention: core_attention_bias_type must be.*did you mean 'alibi'\?"),
    (lambda: linear(parallel_mode="colum"), ValueError,
     r"Linear: parallel_mode must be.*did you mean 'column'\?"),
    (lambda: apex_te.apply_rotary_pos_emb(Q, angles()(6), "bhsd"), ValueError,
     r"apply_rotary_pos_emb: tensor_format must be.*did you mean 'bshd'\?"),
]  # fmt: skip

OPTIONS = [
    (lambda: linear(bias="False"), TypeError, "Linear: bias must be a bool.*got 'False'"),
    (lambda: layer(output_layernorm=None), TypeError,
     "TransformerLayer: output_layernorm must be a bool.*got None"),
    (lambda: linear(params_dtype="bfloat16"), TypeError,
     "Linear: params_dtype must be.*a torch.dtype such as torch.bfloat16, got 'bfloat16'"),
    (lambda: layer(params_dtype="bf16"), TypeError,
     "TransformerLayer: params_dtype must be.*such as torch.bfloat16, got 'bf16'"),
    (lambda: linear(dtype=torch.int8), TypeError, "Linear: dtype must be.*got torch.int8"),
    (lambda: mlp(params_dtype=torch.float8_e4m3fn), TypeError,
     "LayerNormMLP: params_dtype must be.*fp8_model_init makes weights in FP8"),
    (lambda: layer(device="gpu"), ValueError,
     "TransformerLayer: device must be.*such as 'cuda:0' or 'cpu', got 'gpu'"),
    (lambda: linear(device=1.5), TypeError, "Linear: device must be.*got 1.5"),
    (lambda: linear(init_method="xavier"), TypeError,
     "Linear: init_method must be a callable.*got 'xavier'"),
    (lambda: norm_linear(eps="1e-5"), TypeError, "LayerNormLinear: eps must be a float.*got str"),
    (lambda: layer().set_tensor_parallel_group(3), TypeError,
     "TransformerLayer: tp_group must be a torch.distributed.ProcessGroup.*got int"),
    (lambda: mlp(activation="clamped_swiglu", activation_params={"limit": "7"}), TypeError,
     r"LayerNormMLP: activation_params\['limit'\] must be a float.*got str"),
    (lambda: apex_te.LayerNorm((4, -1)), ValueError,
     r"LayerNorm: normalized_shape must be.*at least 1, got \(4, -1\)"),
    (lambda: apex_te.TransformerLayer(18, 32, 4), ValueError,
     "TransformerLayer: num_attention_heads must divide hidden_size=18.*got 4"),
    (lambda: apex_te.DotProductAttention(4, 8, 3), ValueError,
     "DotProductAttention: num_gqa_groups must divide num_attention_heads=4.*got 3"),
    (lambda: apex_te.DotProductAttention(2, None), ValueError,
     "DotProductAttention: kv_channels must be one or two sizes.*got None"),
    (lambda: layer(attention_dropout=10), ValueError,
     "TransformerLayer: attention_dropout must be at least 0 and below 1.*got 10"),
    (lambda: layer(hidden_dropout="0.1"), TypeError,
     "TransformerLayer: hidden_dropout must be a float.*got str"),
    (lambda: core(window_size=128), TypeError,
     "DotProductAttention: window_size must be two ints.*got 128"),
    (lambda: layer(layer_type="decoder", enc_dec_window_size=3), TypeError,
     "TransformerLayer: enc_dec_window_size must be two ints.*got 3"),
    (lambda: core(softmax_scale="0.1"), TypeError,
     "DotProductAttention: softmax_scale must be a float.*got str"),
    (lambda: core(softmax_scale=0), ValueError,
     "DotProductAttention: softmax_scale must be finite and not 0.*got 0"),
    (lambda: attention(softmax_scale=float("nan")), ValueError,
     "MultiheadAttention: softmax_scale must be finite.*got nan"),
    (lambda: layer(layer_number="1"), TypeError,
     "TransformerLayer: layer_number must be an int.*got str"),
    (lambda: apex_te.Fp8Padding(2, 0), ValueError,
     "Fp8Padding: align_size must be at least 1.*got 0"),
    (lambda: angles(7), ValueError, r"RotaryPositionEmbedding: dim \(times.*even .*, got 7"),
    (lambda: apex_te.RotaryPositionEmbedding(8, 25), ValueError,
     "RotaryPositionEmbedding: rotary_percent must be above 0 and at most 1.*got 25"),
    (lambda: apex_te.RotaryPositionEmbedding(8, rotary_base=-1), ValueError,
     "RotaryPositionEmbedding: rotary_base must be above 0.*got -1"),
]  # fmt: skip

CALLS = [
    (lambda: linear(device=META)(X), ValueError,
     r"Linear: parameters must have values.*call reset_parameters\(\)"),
    (lambda: layer(device=META)(H), ValueError,
     r"TransformerLayer: parameters must have values.*to_empty\(device=...\)"),
    (lambda: in_fp8(linear(), X.numpy()), TypeError,
     "Linear: inp must be a torch.Tensor.*got ndarray"),
    (lambda: in_fp8(mlp(), X.to(META)), ValueError, "LayerNormMLP: inp must be on cpu.*got meta"),
    (lambda: in_fp8(linear(), X.to_sparse()), TypeError,
     "Linear: inp must be a dense tensor.*got one of layout torch.sparse_coo"),
    (lambda: linear()(X, np.ones((32, 16))), TypeError,
     "Linear: weight must be a tensor.*got ndarray"),
    (lambda: linear()(X, X), ValueError,
     r"Linear: weight must have shape \[32, 16\].*got \[4, 16\]"),
    (lambda: backward_twice(linear()), RuntimeError,
     r"Linear: backward\(\) may run once.*retain_graph=True"),
    (lambda: backward_twice(mlp()), RuntimeError,
     r"LayerNormMLP: backward\(\) may run once.*retain_graph=True"),
    (lambda: grouped()(X, np.array([2, 2])), TypeError,
     "GroupedLinear: m_splits must be a list of ints.*got ndarray"),
    (lambda: grouped()(X, [4, 4]), ValueError,
     "GroupedLinear: m_splits must be counts.*at most the 4 rows of inp"),
    (lambda: apex_te.Fp8Padding(2)(X.numpy(), [2, 2]), TypeError,
     "Fp8Padding: inp must be a torch.Tensor.*got ndarray"),
    (lambda: core()(*[Q.numpy()] * 3), TypeError,
     "DotProductAttention: query_layer must be a torch.Tensor.*got ndarray"),
    (lambda: core()(Q, None, None), TypeError,
     "DotProductAttention: key_layer must be a torch.Tensor.*got None"),
    (lambda: core()(H, H, H), ValueError,
     r"DotProductAttention: query_layer must have shape.*\[s, b, 2, 8\] .* got \[6, 2, 16\]"),
    (lambda: core()(*[Q.long()] * 3), TypeError,
     "DotProductAttention: query_layer must have a.*floating-point dtype, got torch.int64"),
    (lambda: core()(Q, Q.to(META), Q.to(META)), ValueError,
     "DotProductAttention: key_layer must be on cpu.*got meta"),
    (lambda: core()(Q, Q, Q, core_attention_bias_type="post_scale_bias",
        core_attention_bias=np.zeros((1, 2, 6, 6))), TypeError,
     "DotProductAttention: core_attention_bias must be a torch.Tensor.*got ndarray"),
    (lambda: core(attn_mask_type="padding")(Q, Q, Q, torch.zeros(2, 1, 1, 6,
        dtype=torch.bool, device=META)), ValueError,
     "DotProductAttention: attention_mask must be on cpu.*got meta"),
    (lambda: core(attn_mask_type="padding", attention_type="cross")(Q, Q, Q, (torch.zeros(2,
        1, 1, 6, dtype=torch.bool, device=META),) * 2), ValueError,
     r"DotProductAttention: attention_mask\[0\] must be on cpu.*got meta"),
    (lambda: layer()(H, torch.zeros(2, 1, 1, 6, dtype=torch.bool)), ValueError,
     "TransformerLayer: attention_mask must be None with self_attn_mask_type 'causal'.*"
     "use 'padding_causal'"),
    (lambda: attention(attn_mask_type="padding")(H, torch.zeros(2, 1, 1, 6)), TypeError,
     "MultiheadAttention: attention_mask must be a bool tensor.*got torch.float32"),
    (lambda: packed(None), ValueError,
     "DotProductAttention: cu_seqlens_q must be given.*'thd', got None"),
    (lambda: packed([0, 6, 12]), TypeError,
     "DotProductAttention: cu_seqlens_q must be an int32.*got list"),
    (lambda: packed(int32(0, 6, 12).long()), TypeError,
     "DotProductAttention: cu_seqlens_q must be an int32.*got torch.int64"),
    (lambda: packed(int32(6, 6)), ValueError,
     "DotProductAttention: cu_seqlens_q must ascend.*from 0, got a first element of 6"),
    (lambda: packed(int32(0, 6, 13)), ValueError,
     "DotProductAttention: cu_seqlens_q must end.*the 12 tokens, got 13"),
    (lambda: packed(int32(0, 12), max_seqlen_q=4), ValueError,
     "DotProductAttention: max_seqlen_q must be at least the longest sequence.*12, got 4"),
    (lambda: packed(int32(0, 12), max_seqlen_q="12"), TypeError,
     "DotProductAttention: max_seqlen_q must be an int.*got str"),
    (lambda: layer()(X), ValueError,
     "TransformerLayer: hidden_states must have shape.*"
     r"\[s, b, hidden_size\] with attn_input_format 'sbhd', got \[4, 16\]"),
    (lambda: layer()(torch.ones(6, 2, dtype=torch.int64)), ValueError,
     r"TransformerLayer: hidden_states must have a last dimension of 16.*got \[6, 2\]"),
    (lambda: layer(layer_type="decoder")(H), ValueError,
     "TransformerLayer: encoder_output must be given.*got NoneType"),
    (lambda: cross(H[..., :8]), ValueError,
     r"MultiheadAttention: encoder_output must have a last dimension of 16.*\[6, 2, 8\]"),
    (lambda: cross(torch.randn(6, 3, 16)), ValueError,
     "MultiheadAttention: encoder_output must have the batch of hidden_states.*"
     r"\[6, 2, 16\], got \[6, 3, 16\]"),
    (lambda: decoder(enc_dec_attn_mask=(torch.zeros(2, 1, 1, 6),) * 2), TypeError,
     "TransformerLayer: enc_dec_attn_mask must be a bool tensor.*got torch.float32"),
    (lambda: attention()(H, rotary_pos_emb=angles()), TypeError,
     "MultiheadAttention: rotary_pos_emb must be a tensor of angles.*got RotaryPositionEmbedding"),
    (lambda: layer()(H, rotary_pos_emb=angles()(3)), ValueError,
     "TransformerLayer: rotary_pos_emb must be floating-point angles of 6 positions or more.*"
     r"got torch.float32 \[3, 1, 1, 8\]"),
    (lambda: attention()(H, rotary_pos_emb=angles(16)(6)), ValueError,
     r"MultiheadAttention: rotary_pos_emb must be.*at most a head's .*\[6, 1, 1, 16\]"),
    (lambda: angles()(H), TypeError,
     "RotaryPositionEmbedding: max_seq_len must be an int.*"
     "got Tensor; apply_rotary_pos_emb rotates"),
    (lambda: angles()(-4), ValueError,
     "RotaryPositionEmbedding: max_seq_len must be at least 0.*got -4"),
    (lambda: apex_te.apply_rotary_pos_emb(Q.numpy(), angles()(6)), TypeError,
     "apply_rotary_pos_emb: t must be a torch.Tensor.*got ndarray"),
    (lambda: apex_te.apply_rotary_pos_emb(Q, angles()), TypeError,
     "apply_rotary_pos_emb: freqs must be a torch.Tensor.*got RotaryPositionEmbedding"),
    (lambda: apex_te.apply_rotary_pos_emb(Q, angles()(2)), ValueError,
     r"apply_rotary_pos_emb: freqs must have the angles of 6 positions.*got \[2, 1, 1, 8\]"),
    (lambda: attention(layer_number=1).eval()(H, inference_params={}), TypeError,
     "MultiheadAttention: inference_params must be an InferenceParams.*got dict"),
    (lambda: attention().eval()(H, inference_params=cache()), ValueError,
     "MultiheadAttention: layer_number must be given.*got None"),
    (lambda: attention(layer_number=1).eval()(H, inference_params=cache(2, 4)), ValueError,
     "MultiheadAttention: inference_params.max_sequence_length must be at least 6.*got 4"),
    (lambda: cache().pre_step([1, 1]), TypeError,
     "InferenceParams: step_dict must be a dict.*got list"),
]  # fmt: skip

OPTIMIZERS = [
    (lambda: optimizers.FusedAdam(linear()), TypeError,
     r"FusedAdam: params must be a list.*got Linear; pass its parameters\(\)"),
    (lambda: optimizers.FusedLAMB(linear().parameters), TypeError,
     "FusedLAMB: params must be a list.*got method; call it"),
    (lambda: optimizers.FusedSGD(dict(linear().named_parameters()), lr=0.1), TypeError,
     r"FusedSGD: params must be a list.*got dict; pass its values\(\)"),
    (lambda: optimizers.FusedAdam(params()[0]), TypeError,
     "FusedAdam: params must be a list.*got Parameter; pass a list of it"),
    (lambda: optimizers.FusedAdam([]), ValueError, "FusedAdam: params must hold.*got none"),
    (lambda: optimizers.FusedAdam(iter(())), ValueError, "FusedAdam: params must hold.*got none"),
    (lambda: optimizers.FusedSGD(None), TypeError,
     r"FusedSGD: params must be a list.*got NoneType; pass model.parameters\(\)"),
    (lambda: optimizers.FusedAdam([np.ones(3)]), TypeError,
     "FusedAdam: params must hold torch.nn.Parameters.*got ndarray"),
    (lambda: optimizers.FusedAdam([params()[0] * 2]), ValueError,
     "FusedAdam: params must hold leaf tensors.*got the result of MulBackward0"),
    (in_two_groups, ValueError, r"FusedSGD: params must be in one group each.*shape \[4\]"),
    (lambda: optimizers.FusedAdam([{"param": params()}]), ValueError,
     "FusedAdam: params must be given in each group.*got one of param"),
    (lambda: with_grouped(weight_decy=0.1), ValueError,
     r"FusedAdam: unexpected option 'weight_decy'.*did you mean 'weight_decay'\?"),
    (lambda: adam().add_param_group(params()), TypeError,
     "FusedAdam: param_group must be a dict.*got list"),
    (lambda: adam(weight_deca=0.1), TypeError,
     r"FusedAdam: unexpected argument 'weight_deca'.*did you mean 'weight_decay'\?"),
    (lambda: optimizers.FusedLAMB(params(), betta=0.9), TypeError,
     r"FusedLAMB: unexpected argument 'betta'.*did you mean 'betas'\?"),
    (lambda: adam(lr=-1e-3), ValueError, "FusedAdam: lr must be at least 0.*got -0.001"),
    (lambda: adam(lr=float("inf")), ValueError, "FusedAdam: lr must be finite.*got inf"),
    (lambda: optimizers.FusedSGD(params(), lr="1e-3"), TypeError,
     "FusedSGD: lr must be a float.*got str"),
    (lambda: adam(lr=True), TypeError, "FusedAdam: lr must be a float.*got bool"),
    (lambda: adam(lr=torch.ones(2)), ValueError,
     r"FusedAdam: lr must be a float or a tensor of.*one element, got a tensor of shape \[2\]"),
    (lambda: step_at("x"), TypeError, "FusedAdam: lr must be a float.*got str"),
    (step_of_meta, ValueError, "FusedAdam: params must have values.*on the meta device"),
    (lambda: adam(betas=0.9), ValueError, "FusedAdam: betas must be a tuple of two.*got 0.9"),
    (lambda: adam(betas=(0.9, 1.0)), ValueError, "FusedAdam: betas must be .* below 1.*got 1.0"),
    (lambda: adam(master_weights="yes"), TypeError,
     "FusedAdam: master_weights must be a bool.*got 'yes'"),
    (lambda: adam(capturable="no"), TypeError, "FusedAdam: capturable must be a bool.*got 'no'"),
    (lambda: adam().step(torch.ones(())), TypeError,
     "FusedAdam: closure must be a function.*got Tensor"),
    (lambda: stepped().step(grad_scaler=1024), TypeError,
     "FusedAdam: grad_scaler must be.*a torch.amp.GradScaler, got int"),
    (lambda: adam().load_state_dict("adam.pt"), TypeError,
     "FusedAdam: state_dict must be a dict.*got str"),
    (lambda: adam().load_state_dict(linear().state_dict()), ValueError,
     "FusedAdam: state_dict must be that of an optimizer.*without state and param_groups"),
    (lambda: optimizers.FusedAdam(linear().parameters()).load_state_dict(stepped().state_dict()),
     ValueError, r"FusedAdam: state_dict must have groups of \[2\] parameters.*got \[1\]"),
    (lambda: optimizers.FusedAdam([torch.nn.Parameter(torch.ones(5))]).load_state_dict(
        stepped().state_dict()), ValueError,
     r"FusedAdam: exp_avg must have shape \[5\].*got \[4\]"),
]  # fmt: skip

FUNCTIONS = [
    (lambda: prepared(opt_level="01"), ValueError,
     r"amp.initialize: opt_level must be.*\(with the letter O\), got '01'"),
    (lambda: prepared(opt_lvl="O1"), TypeError,
     r"amp.initialize: unexpected argument 'opt_lvl'.*did you mean 'opt_level'\?"),
    (lambda: amp.initialize(linear().parameters()), TypeError,
     "amp.initialize: models must be torch.nn.Module objects.*got generator"),
    (lambda: prepared(loss_scale="dynamc"), ValueError,
     "amp.initialize: loss_scale must be.*got 'dynamc'"),
    (lambda: prepared(max_loss_scale="1e4"), TypeError,
     "amp.initialize: max_loss_scale must be a float.*got str"),
    (lambda: scaled(1.0), TypeError, "amp.scale_loss: loss must be a tensor.*got float"),
    (lambda: scaled(X), ValueError,
     r"amp.scale_loss: loss must have one element.*such as the mean, got shape \[4, 16\]"),
    (lambda: scaled(torch.tensor(3)), TypeError,
     "amp.scale_loss: loss must be a floating-point.*got torch.int64"),
    (lambda: scaled("loss", linear()), TypeError, "amp.scale_loss: optimizers must be.*got Linear"),
    (lambda: scaled("loss", los_id=1), TypeError,
     r"amp.scale_loss: unexpected argument 'los_id'.*did you mean 'loss_id'\?"),
    (lambda: (prepared(), amp.load_state_dict("amp.pt")), TypeError,
     "amp.load_state_dict: state_dict must be a dict.*got str"),
    (lambda: amp.LossScaler(None), ValueError, "LossScaler: loss_scale must be.*got None"),
    (lambda: apex_te.checkpoint(linear()(X)), TypeError,
     "checkpoint: function must be callable.*got Tensor; pass the function and its arguments"),
    (lambda: apex_te.checkpoint(linear(), X, use_reentrent=False), TypeError,
     r"checkpoint: 'use_reentrent' is an argument neither.*did you mean 'use_reentrant'\?"),
    (lambda: apex_te.checkpoint(linear(), X, use_reentrant="no"), TypeError,
     "checkpoint: use_reentrant must be a bool.*got str"),
    (lambda: apex_te.checkpoint(linear(), X, get_rng_state_tracker=3), TypeError,
     "checkpoint: get_rng_state_tracker must be a function.*got int"),
    (lambda: apex_te.checkpoint(linear(), X, context_fn=print), ValueError,
     "checkpoint: context_fn must be left out with use_reentrant=True.*built-in"),
    (lambda: graphed(lambda x: x, (X,)), TypeError,
     "make_graphed_callables: modules must be a module.*got function"),
    (lambda: graphed(linear(), X), TypeError,
     "make_graphed_callables: sample_args must be a tuple.*got Tensor"),
    (lambda: graphed((linear(), linear()), 3), TypeError,
     "make_graphed_callables: sample_args must be a sequence.*got int"),
    (lambda: graphed(linear()), TypeError,
     "make_graphed_callables: sample_args must be given.*got nothing"),
    (lambda: graphed(linear(), (X,), fp8_enable=True), TypeError,
     "make_graphed_callables: unexpected argument 'fp8_enable'.*mean 'fp8_enabled'"),
    (lambda: graphed(linear(), (X,), fp8_recipe="delayd"), ValueError,
     "make_graphed_callables: fp8_recipe must be a recipe or one of.*got 'delayd'"),
    (lambda: graphed(linear(), (X,), fp8_enabled="yes"), TypeError,
     "make_graphed_callables: fp8_enabled must be a bool.*got str"),
    (lambda: graphed(linear(), (X,), num_warmup_iters=0), ValueError,
     "make_graphed_callables: num_warmup_iters must be at least 1.*got 0"),
    (lambda: apex_te.prebuild(3), TypeError,
     "prebuild: ops must be a name or a list of names.*got int"),
    (lambda: apex_te.prebuild("rms_norm", arch=9.0), TypeError,
     "prebuild: arch must be a text.*got 9.0"),
    (lambda: apex_te.prebuild(op="rms_norm"), TypeError,
     r"prebuild: unexpected argument 'op'.*did you mean 'ops'\?"),
    (lambda: apex_te.fp8_model_init("delayed"), TypeError,
     "fp8_model_init: enabled must be a bool.*got 'delayed'"),
    (lambda: apex_te.fp8_model_init(recipe="delayd"), ValueError,
     "fp8_model_init: recipe must be a recipe or one of.*got 'delayd'"),
    (lambda: apex_te.fp8_model_init(fp8_recipe="delayed"), TypeError,
     r"fp8_model_init: unexpected argument 'fp8_recipe'.*did you mean 'recipe'\?"),
    (lambda: apex_te.init_fp8_state(linear().parameters()), TypeError,
     "init_fp8_state: model must be a torch.nn.Module.*got generator"),
    (lambda: apex_te.init_fp8_state(linear(), 3), TypeError,
     "init_fp8_state: recipe must be a recipe.*got int"),
    (lambda: clip_grad_norm_(linear().parameters(), 1.0), TypeError,
     "clip_grad_norm_: model must be a torch.nn.Module.*got generator"),
    (lambda: clip_grad_norm_(linear(), -1.0), ValueError,
     "clip_grad_norm_: max_norm must be at least 0.*got -1.0"),
    (lambda: clip_grad_norm_(linear()), TypeError,
     "clip_grad_norm_: max_norm must be given.*got nothing"),
]  # fmt: skip

MISTAKES = [*SIZES, *SHARED, *INPUTS, *WORDS, *OPTIONS, *CALLS, *OPTIMIZERS, *FUNCTIONS]


@pytest.fixture(autouse=True)
def without_amp():
    yield
    amp.initialize(torch.nn.Identity(), enabled=False)


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES, ids=[row[2] for row in MISTAKES])
def test_error_names_class_and_argument(call, error, message):
    with pytest.raises(error, match=f"^{message}") as caught:
        call()
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "RMSNorm", "DotProductAttention"])
def test_error_names_the_class_of_the_user(kind):
    base = getattr(apex_te, kind)
    sizes = {"RMSNorm": (16,), "DotProductAttention": (2, 8)}.get(kind, (16, 16))
    mine = type("Mine", (base,), {})
    with pytest.raises(TypeError, match=r"^Mine: unexpected argument 'bais'"):
        mine(*sizes, bais=False)
    with pytest.raises((TypeError, ValueError), match=r"^Mine: "):
        mine(*sizes)(*[H.long()] * (3 if kind == "DotProductAttention" else 1))


def test_checkpoint_of_other_sizes_names_the_parameter():
    with pytest.raises(RuntimeError, match=r"Linear:\n.*weight.*64, 32.*32, 16"):
        linear().load_state_dict(apex_te.Linear(32, 64).state_dict())


def test_second_backward_says_what_to_do():
    for in_fp8 in (False, True):
        with apex_te.fp8_autocast(enabled=in_fp8):
            loss = linear()(X).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            loss.backward()


def test_warnings_of_calls_without_effect():
    with pytest.warns(UserWarning, match=r"^Linear: tp_size=2 is ignored without parallel_mode"):
        linear(tp_size=2)
    with pytest.warns(
        UserWarning, match=r"^init_fp8_state: model must contain FP8 layers, got ReLU"
    ):
        apex_te.init_fp8_state(torch.nn.ReLU())


def test_unknown_argument_of_a_call_is_named():
    with pytest.raises(TypeError, match=r"Linear\.forward\(\) got .* 'is_first_micro_batch'"):
        linear()(X, is_first_micro_batch=True)


def test_python_names_the_class_in_a_call():
    for module in (linear(), apex_te.LayerNorm(16), apex_te.RMSNorm(16)):
        with pytest.raises(TypeError, match=rf"^{type(module).__name__}\.forward\(\) missing"):
            module()


def test_error_that_no_input_explains_stays_as_it_is():
    def fails(weight):
        raise RuntimeError("own text")

    with pytest.raises(RuntimeError, match=r"^own text$"):
        linear(init_method=fails)

    class Fails(apex_te.Linear):
        def _operands(self, weight, bias):
            raise RuntimeError("own text")

    with pytest.raises(RuntimeError, match=r"^own text$"):
        Fails(16, 32)(X, torch.ones(32, 16))


def test_flags_may_be_numbers_of_0_and_1():
    assert apex_te.Linear(16, 32, bias=0).bias is None
    assert apex_te.Linear(16, 32, bias=np.bool_(True)).bias is not None

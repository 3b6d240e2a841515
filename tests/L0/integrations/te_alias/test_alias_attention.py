"""Alias attention and layers: signatures, identity, masks, and the results of apex_te."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from alias_kinds import same
from schemes import SCHEMES

import apex_te
from apex_te.fp8.delayed.serialize import NAMES
from apex_te.integrations.transformer_engine import _torch_extension
from apex_te.integrations.transformer_engine.pytorch import attention as te_attention
from apex_te.integrations.transformer_engine.pytorch import module as te_module
from apex_te.integrations.transformer_engine.pytorch.attention import inference, rope
from apex_te.integrations.transformer_engine.pytorch.attention.dot_product_attention import (
    context_parallel,
)
from apex_te.integrations.transformer_engine.pytorch.transformer import TransformerLayer
from apex_te.module._core.fp8_module import FP8Module

HIDDEN, FFN, HEADS, GROUPS = 32, 48, 4, 2
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
LAYERS = {
    "gpt": {},
    "llama": {
        "num_gqa_groups": GROUPS, "normalization": "RMSNorm", "activation": "swiglu",
        "bias": False, "fuse_qkv_params": True, "attn_input_format": "bshd",
        "self_attn_mask_type": "causal", "qk_norm_type": "RMSNorm",
    },
    "bert": {
        "apply_residual_connection_post_layernorm": True, "output_layernorm": True,
        "self_attn_mask_type": "padding",
    },
    "decoder": {"layer_type": "decoder", "fuse_qkv_params": True},
    "parallel": {"parallel_attention_mlp": True, "window_size": (3, 0)},
    "dropout": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    "sinks": {"softmax_type": "learnable", "num_gqa_groups": GROUPS, "window_size": (3, 0)},
}  # fmt: skip


def pair(options, device, **more):
    """An alias layer and apex_te's with equal values."""
    options = {**PLAIN, **options, **more, "device": device}
    torch.manual_seed(7)
    alias = TransformerLayer(HIDDEN, FFN, HEADS, **options)
    torch.manual_seed(7)
    if options.get("layer_type") == "decoder":  # the alias's default, as Transformer Engine's
        options["enc_dec_attn_mask_type"] = "no_mask"
    return alias, apex_te.TransformerLayer(HIDDEN, FFN, HEADS, **options)


def states(layer):
    found = [m.fp8_state for m in layer.modules() if isinstance(m, FP8Module)]
    return [getattr(s, name).clone() for s in found if s.allocated for name in NAMES]


def arguments(kind, device):
    given = {}
    if kind == "llama":
        given["rotary_pos_emb"] = apex_te.RotaryPositionEmbedding(HIDDEN // HEADS)(6).to(device)
    if kind == "bert":
        lengths = torch.tensor([6, 4], device=device)
        mask = torch.arange(6, device=device) >= lengths[:, None]
        given["attention_mask"] = mask[:, None, None]
    if kind == "decoder":
        torch.manual_seed(3)
        given["encoder_output"] = torch.randn(5, 2, HIDDEN).to(device)
    return given


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("kind", LAYERS)
def test_results_are_those_of_apex_te(kind, scheme, device):
    layers, given = pair(LAYERS[kind], device), arguments(kind, device)
    shape = (2, 6) if kind == "llama" else (6, 2)
    found: list[list] = [[], []]
    for step in range(3):
        for layer, seen in zip(layers, found, strict=True):
            torch.manual_seed(step)
            x = torch.randn(*shape, HIDDEN).to(device).requires_grad_()
            with apex_te.fp8_autocast(scheme is not None, SCHEMES[scheme or "delayed"]):
                out = layer(x, **given)
            out.square().mean().backward()
            seen += [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
            seen += states(layer)
    same(*found)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("attention_type", ["self", "cross"])
def test_multihead_attention_is_that_of_apex_te(layout, attention_type):
    made = []
    for cls in (te_attention.MultiheadAttention, apex_te.MultiheadAttention):
        torch.manual_seed(7)
        made.append(cls(
            HIDDEN, HEADS, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format=layout,
            attention_type=attention_type, attn_mask_type="padding", return_bias=True,
            input_layernorm=True, return_layernorm_output=True, device="cpu",
        ))  # fmt: skip
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    shape = {"sbhd": (5, 2), "bshd": (2, 5), "thd": (8,)}[layout]
    x, y = torch.randn(*shape, HIDDEN), torch.randn(*shape, HIDDEN)
    other = y if attention_type == "cross" else None
    given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "rotary_pos_emb": torch.rand(8, 1, 1, 4)}
    with apex_te.fp8_autocast(fp8_recipe=SCHEMES["tensorwise"]):
        results = [list(m(x, encoder_output=other, **given)) for m in made]
    same(*results)


POSITIONS = {
    te_attention.DotProductAttention.__init__: (
        "num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format "
        "attn_mask_type window_size bottom_right_diagonal sequence_parallel tp_size "
        "get_rng_state_tracker tp_group layer_number attention_type cp_group cp_global_ranks "
        "cp_stream cp_comm_type softmax_scale softmax_type return_max_logit name"
    ),
    te_attention.DotProductAttention.forward: (
        "query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv "
        "cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type "
        "window_size bottom_right_diagonal checkpoint_core_attention core_attention_bias_type "
        "core_attention_bias alibi_slopes fast_zero_fill inference_params pad_between_seqs "
        "fp8_output num_splits"
    ),
    te_attention.MultiheadAttention.__init__: (
        "hidden_size num_attention_heads kv_channels attention_dropout layernorm_epsilon "
        "init_method output_layer_init_method layer_number attn_mask_type window_size "
        "bottom_right_diagonal tp_group tp_size num_gqa_groups fuse_wgrad_accumulation "
        "get_rng_state_tracker sequence_parallel params_dtype return_bias "
        "return_layernorm_output input_layernorm attention_type set_parallel_mode "
        "fuse_qkv_params zero_centered_gamma qkv_weight_interleaved rotary_pos_interleaved "
        "ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad bias "
        "normalization device qkv_format name qk_norm_type qk_norm_eps qk_norm_before_rope "
        "seq_length micro_batch_size softmax_type"
    ),
    te_attention.MultiheadAttention.forward: (
        "hidden_states attention_mask encoder_output attn_mask_type window_size "
        "bottom_right_diagonal is_first_microbatch checkpoint_core_attention inference_params "
        "rotary_pos_emb core_attention_bias_type core_attention_bias alibi_slopes cu_seqlens_q "
        "cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv "
        "fast_zero_fill pad_between_seqs"
    ),
    TransformerLayer.__init__: (
        "hidden_size ffn_hidden_size num_attention_heads num_gqa_groups layernorm_epsilon "
        "hidden_dropout attention_dropout init_method output_layer_init_method layer_number "
        "kv_channels self_attn_mask_type window_size bottom_right_diagonal "
        "enc_dec_attn_mask_type enc_dec_bottom_right_diagonal enc_dec_window_size tp_group "
        "tp_size params_dtype get_rng_state_tracker fuse_wgrad_accumulation seq_length "
        "micro_batch_size sequence_parallel apply_residual_connection_post_layernorm "
        "output_layernorm parallel_attention_mlp layer_type drop_path_rate set_parallel_mode "
        "fuse_qkv_params rotary_pos_interleaved zero_centered_gamma qkv_weight_interleaved "
        "ub_tp_comm_overlap ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad "
        "ub_bulk_wgrad bias activation activation_params normalization device "
        "attn_input_format name qk_norm_type qk_norm_eps qk_norm_before_rope softmax_type"
    ),
    TransformerLayer.forward: (
        "hidden_states attention_mask self_attn_mask_type window_size bottom_right_diagonal "
        "encoder_output enc_dec_attn_mask enc_dec_attn_mask_type enc_dec_window_size "
        "enc_dec_bottom_right_diagonal is_first_microbatch checkpoint_core_attention "
        "inference_params rotary_pos_emb core_attention_bias_type core_attention_bias "
        "alibi_slopes cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded "
        "max_seqlen_q max_seqlen_kv fast_zero_fill pad_between_seqs"
    ),
    te_attention.InferenceParams.__init__: (
        "max_batch_size max_sequence_length num_heads_kv head_dim_k dtype head_dim_v is_paged "
        "total_num_pages page_size max_ctx_len qkv_format custom_cache_manager"
    ),
    te_attention.RotaryPositionEmbedding.__init__: (
        "dim rotary_percent seq_len_interpolation_factor pretrained_max_position_embeddings "
        "rotary_base interleaved"
    ),
    te_attention.apply_rotary_pos_emb: (
        "t freqs tensor_format start_positions interleaved fused cu_seqlens cp_size cp_rank"
    ),
    te_attention.apply_fused_qkv_rotary_pos_emb: (
        "qkv q_freqs k_freqs qkv_split_arg_list tensor_format start_positions interleaved "
        "cu_seqlens cp_size cp_rank"
    ),
    context_parallel.pad_thd_sequences_for_cp: (
        "input_ids labels cu_seqlens divisibility_factor padding_token_id padding_label_id"
    ),
    context_parallel.generate_positional_ids_for_cp: "cu_seqlens divisibility_factor dtype",
    context_parallel.get_batch_on_this_cp_rank: (
        "cu_seqlens_padded input_ids_padded labels_padded position_ids_padded cp_group qvk_format"
    ),
}


@pytest.mark.parametrize("function", POSITIONS, ids=lambda f: f.__qualname__)
def test_positions_are_those_of_transformer_engine(function):
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    found = [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    assert found[found[0] == "self" :] == POSITIONS[function].split()


def test_classes_are_transformer_engines():
    layer, own = pair(LAYERS["llama"], "cpu", attn_input_format="sbhd")
    norm, _ = pair(LAYERS["bert"], "cpu")
    base = te_module.TransformerEngineBaseModule
    assert isinstance(layer, base)
    assert isinstance(layer.self_attention, te_attention.MultiheadAttention)
    assert isinstance(layer.self_attention.layernorm_qkv, te_module.LayerNormLinear)
    assert isinstance(layer.self_attention.core_attention, te_attention.DotProductAttention)
    assert isinstance(layer.self_attention.proj, te_module.Linear)
    assert isinstance(layer.self_attention.q_norm, te_module.RMSNorm)
    assert isinstance(layer.layernorm_mlp, te_module.LayerNormMLP)
    assert isinstance(norm.self_attention.qkv, te_module.Linear)
    assert isinstance(norm.layernorm, te_module.LayerNorm)
    for module in layer.modules():
        assert isinstance(module, base)
        assert type(module).__module__.startswith("transformer_engine.pytorch.")
        assert not isinstance(module, (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.RMSNorm))
    for module in own.modules():
        assert not isinstance(module, base)
    assert TransformerLayer.__module__ == "transformer_engine.pytorch.transformer"
    assert inference.InferenceParams.__module__ == "transformer_engine.pytorch.attention.inference"
    assert rope.RotaryPositionEmbedding.__module__ == "transformer_engine.pytorch.attention.rope"
    assert issubclass(te_attention.InferenceParams, apex_te.InferenceParams)


def test_what_a_layer_cannot_do_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="TransformerLayer: ub_tp_comm_overlap must be"):
        TransformerLayer(HIDDEN, FFN, HEADS, ub_tp_comm_overlap=True)


def test_what_attention_cannot_do_is_refused_by_name():
    make, x = te_attention.DotProductAttention, torch.randn(4, 1, 2, 8)
    assert make(2, 8, attn_mask_type="no_mask", return_max_logit=True)(x, x, x)[1].shape == (2,)
    module = make(2, 8, attn_mask_type="no_mask", name="core", cp_comm_type="a2a")
    assert (module.name, module.cp_comm_type, module.cp_group) == ("core", "a2a", None)
    for name, value in (("fp8_output", True), ("num_splits", 4)):
        with pytest.raises(NotImplementedError, match=f"forward: {name} must be"):
            module(x, x, x, **{name: value})
    plain = module(x, x, x)
    given = {"fast_zero_fill": False, "num_splits": None, "fp8_output": None}
    assert torch.equal(module(x, x, x, **given), plain)
    assert torch.equal(module(x, x, x, bottom_right_diagonal=False), plain)
    with pytest.raises(NotImplementedError, match="bottom_right_diagonal must be None or True"):
        module(x, x, x, window_size=(1, 1), bottom_right_diagonal=False)
    causal = module(x, x, x, attn_mask_type="causal", window_size=(1, 0))
    out = module(x, x, x, attn_mask_type="causal", window_size=(1, 0), bottom_right_diagonal=False)
    assert torch.equal(out, causal)
    with pytest.raises(NotImplementedError, match="MultiheadAttention: ub_overlap_ag must be"):
        te_attention.MultiheadAttention(HIDDEN, HEADS, ub_overlap_ag=True)
    with pytest.raises(NotImplementedError, match="InferenceParams: is_paged must be False"):
        te_attention.InferenceParams(1, 4, is_paged=True)
    with pytest.raises(NotImplementedError, match="PagedKVCacheManager is not available"):
        inference.PagedKVCacheManager()


@pytest.mark.parametrize("kind", ["causal", "no_mask", "causal_bottom_right"])
def test_masks_are_ignored_where_the_type_reads_none(kind):
    """Megatron and Hugging Face models always pass one."""
    layer, _ = pair({}, "cpu", self_attn_mask_type=kind)
    x, mask = torch.randn(5, 2, HIDDEN), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    expected = layer(x)
    assert torch.equal(layer(x, mask), expected)
    assert torch.equal(layer(x, mask.float()), expected)
    assert torch.equal(layer(x, mask, kind, (-1, -1)), expected)
    heads = torch.randn(5, 2, HEADS, 8)
    core, cu = layer.self_attention.core_attention, torch.tensor([0, 3, 8], dtype=torch.int32)
    assert torch.equal(core(heads, heads, heads, mask, None, cu, cu), core(heads, heads, heads))
    attention, query = layer.self_attention, torch.randn(5, 2, HIDDEN)
    assert torch.equal(attention(query, mask), attention(query))


def test_masks_are_read_where_the_type_does():
    layer, own = pair({}, "cpu")
    core = te_attention.DotProductAttention(2, 8, attn_mask_type="padding,causal")
    assert core.attn_mask_type == "padding_causal"
    x, mask = torch.randn(5, 2, HIDDEN), torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    mask[0, ..., 3:] = True
    expected = own(x, mask, "padding_causal")
    for kind in ("padding,causal", "causal,padding", "padding_causal"):
        assert torch.equal(layer(x, mask, kind), expected)
    assert not torch.equal(layer(x, mask, "causal"), expected)
    assert torch.equal(layer(x, ~mask.expand(2, 1, 5, 5), "arbitrary"), own(x, ~mask, "arbitrary"))


def test_windows_end_where_the_mask_type_does():
    module = te_attention.DotProductAttention(2, 8, attn_mask_type="causal", window_size=(2, 0))
    x = torch.randn(6, 1, 2, 8)
    with pytest.warns(UserWarning, match=r"window_size \(2, 5\) is taken for \(2, 0\)"):
        assert torch.equal(module(x, x, x, window_size=(2, 5)), module(x, x, x))
    plain = te_attention.DotProductAttention(2, 8, attn_mask_type="no_mask")
    with pytest.warns(UserWarning, match=r"window_size \(-1, 0\) is taken for \(-1, -1\)"):
        assert torch.equal(plain(x, x, x, window_size=(-1, 0)), plain(x, x, x))
    # A type that a call replaces takes its own window.
    out = module(x, x, x, attn_mask_type="no_mask", window_size=(-1, -1))
    assert torch.equal(out, plain(x, x, x))


def test_a_decoder_takes_its_arguments_in_both_orders():
    layer, own = pair(LAYERS["decoder"], "cpu")
    x, y = torch.randn(5, 2, HIDDEN), torch.randn(4, 2, HIDDEN)
    masks = tuple(torch.zeros(2, 1, 1, n, dtype=torch.bool) for n in (5, 4))
    masks[1][0, ..., 2:] = True
    expected = own(x, encoder_output=y)
    assert torch.equal(layer(x, None, None, None, None, y), expected)
    assert torch.equal(layer(x, None, None, None, y), expected)  # as earlier releases
    assert torch.equal(layer(x, encoder_output=y, enc_dec_attn_mask=masks), expected)
    padded = layer(x, None, None, None, None, y, masks, "padding")
    assert torch.equal(padded, own(x, None, None, None, y, masks, enc_dec_attn_mask_type="padding"))
    assert not torch.equal(padded, expected)
    with pytest.raises(TypeError, match="bottom_right_diagonal must be None or a bool"):
        layer(x, None, None, None, y, y)


def test_gaps_between_packed_sequences():
    layer, own = pair({}, "cpu", attn_input_format="thd", self_attn_mask_type="padding_causal")
    x = torch.randn(9, HIDDEN)
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    padded = torch.tensor([0, 4, 9], dtype=torch.int32)
    given = {"cu_seqlens_q": cu, "cu_seqlens_q_padded": padded}
    out = layer(x, **given, cu_seqlens_kv=cu, cu_seqlens_kv_padded=padded, pad_between_seqs=True)
    assert torch.equal(out, own(x, **given))
    out = layer(x, cu_seqlens_q=cu, cu_seqlens_q_padded=cu.clone(), pad_between_seqs=False)
    assert torch.equal(out, own(x, cu_seqlens_q=cu))


def test_context_parallel_groups():
    layer, _ = pair({}, "cpu")
    layer.set_context_parallel_group(None, None, None, "p2p")
    layer.set_context_parallel_group([None, None], [0], "stream", "a2a+p2p")
    core = layer.self_attention.core_attention
    assert (core.cp_comm_type, core.cp_stream, layer.cp_global_ranks) == ("a2a+p2p", "stream", [0])
    with pytest.raises(TypeError, match="DotProductAttention: cp_group must be a torch"):
        layer.set_context_parallel_group(2, [0, 1], None)
    with pytest.raises(ValueError, match="cp_comm_type must be one of p2p, all_gather, a2a, a2a"):
        te_attention.DotProductAttention(2, 8, cp_comm_type="ring")
    assert core.cp_comm_type == "a2a+p2p"
    core.cp_stream = object()
    assert copy.deepcopy(core).cp_stream is None


@pytest.mark.parametrize("scheme", ["delayed", "blockwise"])
def test_state_dicts_load_both_ways(scheme):
    layer, own = pair({}, "cpu")
    x = torch.randn(6, 2, HIDDEN)
    for each in (layer, own):
        for _ in range(2):
            with apex_te.fp8_autocast(fp8_recipe=SCHEMES[scheme]):
                each(x).sum().backward()
    apex_te.flush_fp8_state()
    saved, plain = layer.state_dict(), own.state_dict()
    assert not any("fp8_state" in key for key in saved)
    extra = {key for key in saved if key.endswith("_extra_state")}
    assert {key.rpartition(".")[0] for key in extra} == {
        "self_attention.core_attention", "self_attention.layernorm_qkv", "self_attention.proj",
        "layernorm_mlp",
    }  # fmt: skip
    assert saved["self_attention.core_attention._extra_state"].numel() == 0
    saved["self_attention.core_attention.fused_attention._extra_state"] = torch.ones(3)
    for state in (saved, plain):
        fresh, _ = pair({}, "cpu")
        fresh.load_state_dict(state)
        same(states(fresh), states(own))
        with torch.no_grad(), apex_te.fp8_autocast(fp8_recipe=SCHEMES[scheme]):
            assert torch.equal(fresh(x), own(x))
    del saved["self_attention.core_attention._extra_state"]
    pair({}, "cpu")[0].load_state_dict(saved)


def test_copies_and_meta_layers():
    layer, _ = pair(LAYERS["llama"], "cpu", attn_input_format="sbhd")
    x = torch.randn(5, 2, HIDDEN)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    made = TransformerLayer(HIDDEN, FFN, HEADS, **PLAIN, device="meta")
    made.reset_parameters(defer_init=True)
    assert all(p.is_meta for p in made.parameters())
    made.reset_parameters(defer_init=False)
    assert not any(p.is_meta for p in made.parameters())
    assert made(x.to(next(made.parameters()).device)).shape == x.shape


@pytest.mark.long
@pytest.mark.cover(0)
@pytest.mark.parametrize("kind", ["decoder", "llama"])
def test_layers_compile_in_one_graph(kind):
    layer, _ = pair(LAYERS[kind], "cpu")
    given = arguments(kind, "cpu")
    x = torch.randn(2, 6, HIDDEN) if kind == "llama" else torch.randn(6, 2, HIDDEN)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with apex_te.fp8_autocast(fp8_recipe=SCHEMES["tensorwise"]):
        torch.testing.assert_close(run(x, mask, **given), layer(x, mask, **given))


def test_sequences_are_padded_to_a_multiple():
    lengths, cu = (7, 11, 0, 4), torch.tensor([0, 7, 18, 18, 22])
    ids = torch.arange(22)
    tokens, labels, padded = context_parallel.pad_thd_sequences_for_cp(
        ids[None], ids[None] + 100, cu, 4, padding_token_id=-1, padding_label_id=-7
    )
    assert padded.tolist() == [0, 8, 20, 20, 24]
    expected_ids, expected_labels, begin = [], [], 0
    for length in lengths:
        own = list(range(begin, begin + length))
        rest = -length % 4
        expected_ids += own + [-1] * rest
        expected_labels += [n + 100 for n in own] + [-7] * rest
        begin += length
    assert tokens.tolist() == expected_ids
    assert labels.tolist() == expected_labels
    assert padded.dtype is cu.dtype
    places = context_parallel.generate_positional_ids_for_cp(cu, 4, torch.int32)
    assert places.tolist() == [*range(8), *range(12), *range(4)]
    assert places.dtype is torch.int32
    batch = (tokens[None], labels[None], None)
    same = context_parallel.get_batch_on_this_cp_rank(padded, *batch)
    assert all(ours is theirs for ours, theirs in zip(same, batch, strict=True))
    with pytest.raises(NotImplementedError, match="qvk_format must be 'thd', got 'bshd'"):
        context_parallel.get_batch_on_this_cp_rank(padded, *batch, None, "bshd")
    with pytest.raises(ValueError, match="divisibility_factor must be above 0"):
        context_parallel.pad_thd_sequences_for_cp(ids, ids, cu, 0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_indices_of_a_rank_s_tokens(device, ranks):
    """Chunks ``r`` and ``2n - 1 - r`` of each sequence, in the order of the sequences."""
    sizes = [size * 2 * ranks for size in (3, 0, 1, 4)]
    cu = torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)
    tokens = torch.arange(sum(sizes)).split(sizes)
    for rank in range(ranks):
        parts = [sequence.chunk(2 * ranks) for sequence in tokens if len(sequence)]
        expected = torch.cat([c for p in parts for c in (p[rank], p[2 * ranks - 1 - rank])])
        found = _torch_extension.thd_get_partitioned_indices(cu, sum(sizes), ranks, rank)
        assert (found.dtype, found.device) == (torch.int32, cu.device)
        assert found.tolist() == expected.tolist()
    for name, values in {
        "rank must be from 0": (cu, sum(sizes), ranks, ranks),
        "total_tokens must be a multiple": (cu, sum(sizes) + 1, ranks, 0),
        "cu_seqlens must have sequences of multiples": ((cu + 1).cpu() // 2, 8 * ranks, ranks, 0),
    }.items():
        with pytest.raises(ValueError, match=f"thd_get_partitioned_indices: {name}"):
            _torch_extension.thd_get_partitioned_indices(*values)
    with pytest.raises(TypeError, match="cu_seqlens must be an int32"):
        _torch_extension.thd_get_partitioned_indices(cu.long(), sum(sizes), ranks, 0)


def test_a_layer_s_clamped_activation():
    """``activation_params`` reach the layer's MLP, as they reach an MLP by itself."""
    params = {"limit": 0.1, "alpha": 1.0}
    made = {"activation": "clamped_swiglu", "activation_params": params, "device": "cpu"}
    layer = TransformerLayer(HIDDEN, FFN, HEADS, **made)
    mlp = te_module.LayerNormMLP(HIDDEN, FFN, **made)
    mlp.load_state_dict(layer.layernorm_mlp.state_dict())
    x = torch.randn(4, 2, HIDDEN)
    torch.testing.assert_close(layer.layernorm_mlp(x)[0], mlp(x) - mlp.fc2_bias)

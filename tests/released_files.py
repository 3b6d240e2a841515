"""Released FP8 checkpoints of tiny models, with random codes and scales."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LLAMA = {
    "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
IDS = torch.arange(24).view(2, 12) % 37 + 2
SIZES = LLAMA | {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64}
EDGES = LLAMA | {"hidden_size": 160, "intermediate_size": 272, "head_dim": 40}
DEEPSEEK = SIZES | EXPERTS | {
    "moe_intermediate_size": 128, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "q_lora_rank": 72, "kv_lora_rank": 136, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24, "v_head_dim": 24, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    "head_dim": 8,
}  # fmt: skip
# By name: class of the configuration and of the model, and the configuration.
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES),
    "qwen3 edges": ("Qwen3Config", "Qwen3ForCausalLM", EDGES),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", SIZES | EXPERTS | {
        "moe_intermediate_size": 128}),
    "qwen3_moe edges": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EDGES | EXPERTS | {
        "moe_intermediate_size": 192}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", SIZES | {"num_local_experts": 4}),
    # Of 256 rows, or 4 experts, for two ranks.
    "fsdp": ("LlamaConfig", "LlamaForCausalLM", SIZES | {
        "hidden_size": 256, "num_key_value_heads": 4}),
    "fsdp experts": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", SIZES | EXPERTS | {
        "hidden_size": 256, "num_key_value_heads": 4, "moe_intermediate_size": 128}),
    # With weights of convolutions, which have three dimensions, too.
    "fsdp convolutions": ("Lfm2Config", "Lfm2ForCausalLM", LLAMA | {
        "hidden_size": 256, "intermediate_size": 512, "layer_types": ["conv", "full_attention"],
        "num_key_value_heads": 4}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", DEEPSEEK),
}  # fmt: skip

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}


def compressed(strategy, dynamic=True, **arguments):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    group = {
        "targets": ["Linear"], "weights": weights | arguments,
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": dynamic},
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "quantization_status": "compressed", "config_groups": {"group_0": group},
    }  # fmt: skip


# By name: the configuration, the last part of a scale's key, its form in the file (group sizes, 0
# for all, or the dimensions of the one scale), its dtype, and whether inputs have scales.
LAYOUTS = {
    "fp8": (BLOCKS, "weight_scale_inv", (128, 128), torch.float32, False),
    "fp8 bytes": (BLOCKS | {"scale_fmt": "ue8m0"}, "weight_scale_inv", (128, 128), torch.uint8,
                  False),
    "fp8 e8m0": (BLOCKS | {"scale_fmt": "ue8m0"}, "weight_scale_inv", (128, 128), E8M0, False),
    "fp8 tensor": (FP8 | {"weight_block_size": None}, "weight_scale", (), torch.float32, False),
    "fp8 static": (FP8 | {"activation_scheme": "static", "weight_block_size": None},
                   "weight_scale", (1,), torch.float32, True),
    "deepseek names": (BLOCKS, "scale", (128, 128), torch.float32, False),
    "ct tensor": (compressed("tensor", False), "weight_scale", (1,), torch.bfloat16, True),
    "ct block": (compressed("block", block_structure="128x128"), "weight_scale", (128, 128),
                 torch.bfloat16, False),
    "modelopt": ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
                 "weight_scale", (), torch.float32, True),
    "modelopt blocks": ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "weight_scale",
                        (128, 1, 128, 1), torch.float32, False),
    "ct channel": (compressed("channel"), "weight_scale", (1, 0), torch.bfloat16, False),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "weight_scale",
               (1, 0), torch.float32, False),
    "modelopt channel": ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
                         "weight_scale", (-1,), torch.float32, False),
    "mxfp8": ({"quant_method": "mxfp8"}, "weight_scale_inv", (1, 32), torch.uint8, False),
}  # fmt: skip


def is_quantized(key, value):
    """The weights that releases have in FP8: those of linear layers and experts."""
    kept = ("embed_tokens", "lm_head", ".gate.weight", "norm")
    return value.dim() == 2 and not any(part in key for part in kept)


def scale_of(shape, form, dtype):
    """Random scales in the file's shape and dtype, and float32 ones for each element."""
    if form in ((), (1,)):
        size, grid = form, (1, 1)
    elif form == (-1,):
        size = grid = shape[:1]
    else:
        blocks = [each for each in form if each != 1 or len(form) == 2]
        size = grid = [-(-n // b) if b else 1 for n, b in zip(shape, blocks, strict=True)]
        if len(form) == 4:
            size = (grid[0], 1, grid[1], 1)
    scale = torch.rand(tuple(size)) * 1e-3 + 1e-4
    if dtype in (torch.uint8, E8M0):
        scale = scale.log2().floor().exp2()
    stored = scale.to(E8M0 if dtype is torch.uint8 else dtype)
    wide = stored.float()
    if form == (-1,):
        wide = wide[:, None].expand(shape)
    elif form in ((), (1,)):
        wide = wide.reshape(1, 1).expand(shape)
    else:
        wide = wide.reshape(*grid)
        for dim, block in enumerate(b for b in form if b != 1 or len(form) == 2):
            wide = wide.repeat_interleave(block or shape[dim], dim).narrow(dim, 0, shape[dim])
    return (stored.view(torch.uint8) if dtype is torch.uint8 else stored), wide


def release(model, layout, folder, max_shard_size="5GB", same=False):
    """Writes a checkpoint; returns its tensors, and those with the values of its FP8 weights.

    ``same`` gives gate and up, which models join, one scale.
    """
    kind, cls, values = MODELS[model]
    config = getattr(transformers, kind)(**values)
    made = getattr(transformers, cls)(config)
    for parameter in made.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    made.save_pretrained(folder, max_shard_size=max_shard_size)
    quantization, end, form, dtype, static = LAYOUTS[layout]
    tensors, decoded, last = {}, {}, {}
    for file in sorted(folder.glob("*.safetensors")):
        written = {}
        for key, value in safetensors_torch.load_file(file).items():
            if not is_quantized(key, value):
                written[key] = decoded[key] = value
                continue
            codes = (torch.randn(value.shape) * 60).clamp(-448, 448).to(E4M3)
            scale, wide = scale_of(value.shape, form, dtype)
            joined = key.replace("up_proj", "gate_proj").replace(".w3.", ".w1.")
            if same and joined in last:
                scale, wide = last[joined]
            last[key] = scale, wide
            stem = key.removesuffix("weight")
            written |= {key: codes, stem + end: scale.clone()}
            decoded[key] = codes.float() * wide
            if static:
                written[stem + "input_scale"] = torch.rand(scale.shape) * 1e-2 + 1e-2
        safetensors_torch.save_file(written, file, metadata={"format": "pt"})
        tensors |= written
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        owner = content["weight_map"]
        for key in tensors:
            stem = key[: -len(end)] if key.endswith(f".{end}") else key.removesuffix("input_scale")
            owner.setdefault(key, owner.get(f"{stem}weight"))
        index.write_text(json.dumps(content))
    path = folder / "config.json"
    content = json.loads(path.read_text())
    if "quantization" in quantization:
        (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    else:
        content["quantization_config"] = quantization
    path.write_text(json.dumps(content))
    return tensors, decoded


def plain_model(model, decoded, folder):
    """The model with the decoded values, in float32."""
    kind, cls, values = MODELS[model]
    getattr(transformers, kind)(**values).save_pretrained(folder)
    wide = {key: value.float().contiguous() for key, value in decoded.items()}
    safetensors_torch.save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    return getattr(transformers, cls).from_pretrained(folder, dtype=torch.float32).eval()


def read(folder):
    """The tensors of all files in a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors_torch.load_file(file)
    return found


def assert_same_tensors(found, wanted):
    """Keys, dtypes, shapes and bytes are equal."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype is value.dtype, key
        assert found[key].shape == value.shape, key
        ours, theirs = (each.reshape(-1).view(torch.uint8) for each in (found[key], value))
        assert torch.equal(ours, theirs), key

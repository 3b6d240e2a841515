"""Released FP8 checkpoints that are read into models made without values, on one rank."""

import pytest
import torch
from released_files import IDS, release

from apex_te import from_fp8_checkpoint, from_torch
from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.integrations import load_fp8_shards

pytest.importorskip("transformers", "5.23")

CASES = [
    ("llama", "fp8", True), ("qwen3 edges", "ct block", False), ("deepseek_v3", "fp8 e8m0", False),
    ("llama", "fp8 tensor", False), ("mixtral", "modelopt blocks", True),
    ("fsdp convolutions", "fp8", False), ("llama", "modelopt channel", True),
    ("qwen3_moe edges", "ct channel", False),
]  # fmt: skip


def assert_same_parameters(found, wanted):
    ours, theirs = (dict(each.named_parameters()) for each in (found, wanted))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert type(ours[name]) is type(value), name
        if type(value) is FP8Parameter:
            pairs = zip(ours[name].codes(), value.codes(), strict=True)
            same = all(torch.equal(*(x.view(torch.uint8) for x in pair)) for pair in pairs)
        else:
            same = torch.equal(ours[name], value)
        assert same, name


@pytest.mark.parametrize(("model", "layout", "fuse"), CASES)
def test_same_as_loaded_whole(model, layout, fuse, device, tmp_path):
    release(model, layout, tmp_path, max_shard_size="100KB")
    options = {"dtype": torch.float32, "fuse": fuse}
    whole = from_fp8_checkpoint(tmp_path, **options).to(device)
    parts = from_fp8_checkpoint(tmp_path, **options, device_map="meta")
    assert parts.hf_quantizer.recipe == whole.hf_quantizer.recipe
    parts.to_empty(device=device)
    load_fp8_shards(parts)
    assert_same_parameters(parts, whole)
    with torch.no_grad():
        assert torch.equal(*(each(IDS.to(device)).logits for each in (parts, whole)))


def test_refusals(tmp_path):
    release("mixtral", "ct tensor", tmp_path / "static")
    release("qwen3_moe edges", "fp8", tmp_path / "edges")
    release("llama", "ct channel", tmp_path / "channel")
    release("llama", "fp8", tmp_path / "fp32")
    for folder, recipe, what in (
        ("static", None, "scales of inputs"),
        ("edges", None, "192 features, no multiple of 128"),
        ("channel", "blockwise", "channel scales, held by BlockScaling"),
        ("fp32", "blockwise", "scales that are not powers of two"),
    ):
        with pytest.raises(NotImplementedError, match=f"device_map must be .* with {what}"):
            from_fp8_checkpoint(tmp_path / folder, recipe=recipe, device_map="meta")
    for name in ("distributed_config", "tp_plan"):
        with pytest.raises(ValueError, match=f"{name} must not be given, since load_fp8_shards"):
            from_fp8_checkpoint(tmp_path / "static", **{name: "auto"})
    release("mixtral", "fp8 tensor", tmp_path / "apart")
    apart = from_fp8_checkpoint(tmp_path / "apart", device_map="meta")
    with pytest.raises(ValueError, match=r"call model.to_empty\(device=...\), got .* on the meta"):
        load_fp8_shards(apart)
    apart.to_empty(device="cpu")
    with pytest.raises(NotImplementedError, match="must have the same scale for weights that"):
        load_fp8_shards(apart)
    with pytest.raises(TypeError, match="model must be a"):
        load_fp8_shards("model")
    with pytest.raises(ValueError, match="with device_map='meta', got Sequential"):
        load_fp8_shards(from_torch(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    release("llama", "fp8", tmp_path / "less")
    less = from_fp8_checkpoint(tmp_path / "less", device_map="meta").to_empty(device="cpu")
    less.hf_quantizer.files = []
    with pytest.raises(ValueError, match="files must have all of the model's tensors, got no"):
        load_fp8_shards(less)

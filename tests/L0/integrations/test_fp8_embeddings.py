"""Released checkpoints whose embeddings and head are in FP8."""

import json

import pytest
import torch
from released_files import IDS, read, release

from apex_te import export_fp8, from_fp8_checkpoint
from apex_te.fp8.parameter.parameter import FP8Parameter

pytest.importorskip("transformers", "5.23")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _quantize(folder, key, scale):
    """Puts a tensor of the files into FP8; returns its codes."""
    file = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    codes = (torch.randn(tensors[key].shape) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors |= {key: codes, f"{key.removesuffix('weight')}weight_scale_inv": scale}
    safetensors_torch.save_file(tensors, file, metadata={"format": "pt"})
    return codes


def _configure(folder, **options):
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"] | options.pop("quantization", {})
    config |= options | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_embedding_is_decoded_and_head_held(tied, blocks, device, tmp_path):
    release("llama", "fp8" if blocks else "fp8 tensor", tmp_path)
    size = (1, 2) if blocks else ()
    scales = [torch.rand(size) * 1e-3 + 1e-4 for _ in range(2)]
    codes = _quantize(tmp_path, EMBEDDING, scales[0])
    convert = {"modules_to_convert": ["model.embed_tokens", "other"]}
    if tied:
        tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
        tensors.pop(HEAD)
        safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    else:
        head = _quantize(tmp_path, HEAD, scales[1])
    _configure(tmp_path, tie_word_embeddings=tied, quantization=convert)
    with pytest.warns(UserWarning, match=r"embeddings in FP8 are .* torch.float32: model.embed"):
        model = from_fp8_checkpoint(tmp_path, dtype=torch.float32).to(device)
    wide = scales[0]
    if blocks:
        wide = wide.repeat_interleave(40, 0).repeat_interleave(128, 1)[:, : codes.shape[1]]
    values = codes.float() * wide
    assert torch.equal(model.get_parameter(EMBEDDING).cpu(), values)
    if tied:
        assert model.get_parameter(HEAD) is model.get_parameter(EMBEDDING)
    else:
        held = model.get_parameter(HEAD)
        assert type(held) is FP8Parameter
        assert torch.equal(held.codes()[0].cpu().view(torch.uint8), head.view(torch.uint8))
    export_fp8(model, tmp_path / "again", layout="file")
    written = read(tmp_path / "again")
    assert torch.equal(written.pop(EMBEDDING), values)
    kept = {k: v for k, v in read(tmp_path).items() if not k.startswith("model.embed_tokens")}
    assert written.keys() == kept.keys()
    assert all(torch.equal(written[k].view(torch.uint8), v.view(torch.uint8))
               for k, v in kept.items() if v.dim())  # fmt: skip
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_convert"] == ["other"]
    again = from_fp8_checkpoint(tmp_path / "again", dtype=torch.float32).to(device)
    with torch.no_grad():
        assert torch.equal(*(each(IDS.to(device)).logits for each in (model, again)))
    with pytest.raises(NotImplementedError, match="embeddings in FP8, which are decoded, got 'me"):
        from_fp8_checkpoint(tmp_path, device_map="meta")

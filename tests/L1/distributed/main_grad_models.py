"""Models whose weight gradients are accumulated in main_grad, for the tests over ranks."""

import torch

import apex_te


def model_of(kind, device, fused=True):
    """Returns an "mlp", a Transformer "layer" or, else, two linear layers, of equal weights."""
    torch.manual_seed(5)
    options = {"fuse_wgrad_accumulation": fused, "device": device}
    if kind == "mlp":
        return apex_te.LayerNormMLP(32, 64, **options)
    if kind == "layer":
        return apex_te.TransformerLayer(
            32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, **options
        )
    return torch.nn.Sequential(
        apex_te.Linear(32, 64, **options), torch.nn.ReLU(), apex_te.Linear(64, 32, **options)
    )


def with_main_grads(model):
    """A main_grad, which the first microbatch overwrites, for every matrix; biases have .grad."""
    for parameter in model.parameters():
        parameter.grad = None
        if parameter.dim() == 2:
            parameter.main_grad = torch.full_like(parameter, 7.0, dtype=torch.float32)
    return model

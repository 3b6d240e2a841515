"""How far fp32 rounding can move a model's output and gradients, measured in fp64."""

import copy

import torch

# Half a unit in the last place of fp32, and the roundings that one layer's result is worth: the
# errors of its sums add up like a random walk, and the sums here have some 16 to 100 terms.
UNIT = torch.finfo(torch.float32).eps / 2
ROUNDINGS = 4
DRAWS = 8


def rounding_bounds(model, inputs, run):
    """The exact results of ``run(model, inputs)``, and how far an fp32 run may be from them.

    The model is run in fp64 with what each layer gives, and the gradients that enter and leave it,
    moved at random by at most ``ROUNDINGS`` roundings of the largest value. An error of that size
    can grow on its way, and a gradient that is exactly 0 (a key's bias, which softmax does not
    see) is all rounding: a fixed tolerance knows neither.

    Returns:
        (exact, bounds): fp64 tensors and numbers, both by the names that ``run`` gives.
    """
    model = copy.deepcopy(model).cpu().double()
    inputs = inputs.cpu()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    exact = named(run(model, inputs))
    generator = torch.Generator().manual_seed(7)

    def moved(tensor):
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return tensor + noise * (ROUNDINGS * UNIT * tensor.detach().abs().max())

    def pre_hook(module, args):
        if not isinstance(args[0], torch.Tensor) or not args[0].requires_grad:
            return None
        x = args[0].view_as(args[0])  # its gradient is what this layer's backward gives
        x.register_hook(moved)
        return (x, *args[1:])

    def hook(module, args, out):
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return None
        out = moved(out)
        out.register_hook(moved)
        return out

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(pre_hook)
            module.register_forward_hook(hook)
    bounds = dict.fromkeys(exact, 0.0)
    for _ in range(DRAWS):
        for key, value in named(run(model, inputs)).items():
            bounds[key] = max(bounds[key], 2 * (value - exact[key]).abs().max().item())
    return exact, bounds


def named(results):
    """Output and gradients as one dict."""
    out, grads = results
    return {"output": out, **grads}


def assert_within(results, exact, bounds):
    """``results``, by name, lie within ``bounds`` of the exact ones."""
    assert results.keys() == exact.keys()
    for key, value in results.items():
        error = (value.cpu().double() - exact[key]).abs().max().item()
        assert error <= bounds[key], f"{key}: {error:.3g} above {bounds[key]:.3g}"

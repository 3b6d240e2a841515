"""A parameter without plain storage, as FP8 parameters are: int8 codes that copy_ writes."""

import torch


class QuantizedParam(torch.Tensor):
    """Nominal dtype of a wrapper subclass; value = codes * STEP."""

    STEP = 1 / 16

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, dtype=value.dtype, device=value.device, requires_grad=True
        )

    def __init__(self, value):
        self.codes = self.quantize(value)
        self.kept = value.detach().float().clone()
        self.copies = 0

    @classmethod
    def quantize(cls, value):
        return (value.detach().float() / cls.STEP).round().clamp(-127, 127).to(torch.int8)

    def dequantize(self):
        return (self.codes.float() * self.STEP).to(self.dtype)

    def get_high_precision_init_val(self):
        return self.kept

    def clear_high_precision_init_val(self):
        self.kept = None

    def __tensor_flatten__(self):
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0].dequantize()
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].codes = cls.quantize(args[1])
            args[0].copies += 1
            return args[0]
        plain = [a.dequantize() if isinstance(a, cls) else a for a in args]
        return func(*plain, **(kwargs or {}))

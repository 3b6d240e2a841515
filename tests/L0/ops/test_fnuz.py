"""The fnuz formats of AMD's gfx94x: codecs against ml_dtypes, casts, products, and their choice."""

import ml_dtypes
import numpy as np
import pytest
import torch
from checks import in_pairs

import apex_te
from apex_te.fp8.scheme.current import CurrentScalingQuantizer
from apex_te.fp8.scheme.delayed import DelayedScalingQuantizer
from apex_te.fp8.tensor import formats_of
from apex_te.ops import cast_transpose as cast
from apex_te.ops import current_scale as current
from apex_te.ops import reference_codec
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.current_scale import current_scale
from apex_te.ops.fp8_gemm import fp8_gemm
from apex_te.recipe import CurrentScaling, DelayedScaling, Format
from apex_te.runtime import device as gpu_arch
from apex_te.runtime import ops

ORACLES = {
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
}
LARGEST = {torch.float8_e4m3fnuz: 240.0, torch.float8_e5m2fnuz: 57344.0}
FORMATS = list(ORACLES)
ALL_CODES = torch.arange(256, dtype=torch.uint8)
CPU = torch.device("cpu")


def codes_of(tensor):
    return tensor.view(torch.uint8)


def one(value):
    return torch.tensor([value], dtype=torch.float32)


def expected_codes(values, fp8):
    """ml_dtypes' codes, with finite overflow and infinity saturated, which it makes NaN."""
    largest = LARGEST[fp8]
    exact = values.to(torch.float32).numpy()
    with np.errstate(invalid="ignore"):
        clamped = np.where(np.isnan(exact), exact, np.clip(exact, -largest, largest))
        codes = clamped.astype(ORACLES[fp8]).view(np.uint8)
    return torch.from_numpy(codes)


def every_number(dtype):
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)


def ties(fp8):
    """Every midpoint of neighbouring values, the numbers beside it, and those values."""
    positive = np.arange(128, dtype=np.uint8).view(ORACLES[fp8]).astype(np.float32)
    middle = ((positive[1:].astype(np.float64) + positive[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middle, np.float32(side)) for side in (0, np.inf)]
    values = np.concatenate([positive, middle, *near])
    return torch.from_numpy(np.concatenate([values, -values]))


def random_bits(count):
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def check_codes(values, fp8):
    """Both encoders against ml_dtypes; the kernel's scale is 1."""
    expected = expected_codes(values, fp8)
    reference = codes_of(reference_codec.encode_fp8(values.float(), fp8))
    assert torch.equal(reference, expected)
    made = cast_transpose(values.reshape(1, -1), one(1.0), fp8, columnwise=False).rowwise
    assert torch.equal(codes_of(made).reshape(-1), expected)


@pytest.mark.parametrize("fp8", FORMATS)
def test_decode_of_every_code(fp8):
    expected = ALL_CODES.numpy().view(ORACLES[fp8]).astype(np.float32)
    assert np.isnan(expected[0x80])
    assert np.isnan(expected).sum() == 1
    out = torch.empty(1, 256)
    ops("fp8_gemm").fp8_decode(ALL_CODES.view(fp8).reshape(1, 256), out)
    for made in (reference_codec.decode_fp8(ALL_CODES.view(fp8)), out[0]):
        np.testing.assert_array_equal(made.numpy(), expected)
        assert not np.signbit(made.numpy()[0])


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_encode_of_every_number_of_16_bits(dtype, fp8):
    check_codes(every_number(dtype), fp8)


@pytest.mark.parametrize("fp8", FORMATS)
def test_encode_of_ties(fp8):
    check_codes(ties(fp8), fp8)


@pytest.mark.parametrize("fp8", FORMATS)
def test_encode_of_random_float32(fp8):
    check_codes(random_bits(1 << 20), fp8)


@pytest.mark.parametrize("fp8", FORMATS)
def test_specials(fp8):
    inf, nan, tiny = float("inf"), float("nan"), 2.0**-40
    values = torch.tensor([[nan, -nan, inf, -inf, 1e9, -1e9, 0.0, -0.0, tiny, -tiny]])
    made = codes_of(cast_transpose(values, one(1.0), fp8, columnwise=False).rowwise)[0].tolist()
    largest = codes_of(torch.tensor(LARGEST[fp8]).to(fp8).reshape(1)).item()
    assert largest == 0x7F
    assert made == [0x80, 0x80, 0x7F, 0xFF, 0x7F, 0xFF, 0, 0, 0, 0]


@in_pairs(
    fp8=FORMATS,
    dtype=[torch.float32, torch.float16, torch.bfloat16],
    shape=[(1, 1), (17, 129), (256, 384)],
)
def test_cast_transpose(shape, dtype, fp8):
    x = (torch.randn(shape) * 30).to(dtype)
    amax = one(0.0)
    out = cast_transpose(x, one(7.3), fp8, amax=amax)
    expected = cast.reference(x, one(7.3), fp8)
    assert out.rowwise.dtype is out.columnwise.dtype is fp8
    assert torch.equal(codes_of(out.rowwise), codes_of(expected.rowwise))
    assert torch.equal(codes_of(out.columnwise), codes_of(expected.columnwise))
    assert amax.item() == x.float().abs().max().item()


@pytest.mark.parametrize("fp8", FORMATS)
def test_current_scale(fp8):
    x = torch.randn(33, 65) * 30
    out, expected = current_scale(x, fp8), current.reference(x, fp8)
    assert torch.equal(codes_of(out.rowwise), codes_of(expected.rowwise))
    assert torch.equal(codes_of(out.columnwise), codes_of(expected.columnwise))
    assert torch.equal(out.scale, expected.scale)
    assert (codes_of(out.rowwise) & 0x7F).max() == 0x7F  # the largest element is fp8_max


@pytest.mark.parametrize("b", FORMATS)
def test_product(b):
    left, right = torch.randn(32, 48), torch.randn(16, 48)
    codes = (
        cast_transpose(left, one(16.0), torch.float8_e4m3fnuz).rowwise,
        cast_transpose(right, one(16.0), b).rowwise,
    )
    out = fp8_gemm(*codes, one(1 / 16), one(1 / 16), out_dtype=torch.float32)
    exact = [reference_codec.decode_fp8(c).double() / 16 for c in codes]
    torch.testing.assert_close(out.double(), exact[0] @ exact[1].t(), rtol=1e-5, atol=1e-5)


def test_two_e5m2fnuz_operands_are_refused():
    x = torch.zeros(16, 16, dtype=torch.float8_e5m2fnuz)
    with pytest.raises(NotImplementedError, match="got float8_e5m2 twice"):
        fp8_gemm(x, x, one(1.0), one(1.0))


@pytest.fixture(params=["gfx940", "gfx941", "gfx942"])
def fnuz_device(request, monkeypatch):
    """The CPU, taken for such a GPU."""
    monkeypatch.setattr(gpu_arch, "amd_arch", lambda device: request.param)
    return CPU


FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def test_choice_on_gfx94x(fnuz_device):
    hybrid = formats_of(Format.HYBRID, fnuz_device)
    assert hybrid == (240.0, 57344.0, *FNUZ)
    assert formats_of(Format.E4M3, fnuz_device) == (240.0, 240.0, FNUZ[0], FNUZ[0])
    assert formats_of(Format.E5M2, fnuz_device) == (57344.0, 57344.0, FNUZ[1], FNUZ[1])
    assert formats_of(Format.HIF8, fnuz_device) is Format.HIF8.value
    assert gpu_arch.has_fp8_products(fnuz_device)


@pytest.mark.parametrize(
    ("arch", "products"),
    [("gfx90a", False), ("gfx950", True), ("gfx1100", False), ("gfx1201", True), (None, True)],
)
def test_choice_elsewhere(monkeypatch, arch, products):
    monkeypatch.setattr(gpu_arch, "amd_arch", lambda device: arch)
    assert formats_of(Format.HYBRID, CPU) is Format.HYBRID.value
    assert gpu_arch.has_fp8_products(CPU) is products


class FakeProperties:
    gcnArchName = "gfx942:sramecc+:xnack-"


def test_arch_is_read_off_a_rocm_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2.41133")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: FakeProperties)
    device = torch.device("cuda", 0)
    assert gpu_arch.amd_arch(device) == "gfx942"
    assert gpu_arch.multiplies_fnuz(device)
    assert gpu_arch.nvidia_capability(device) == (0, 0)
    assert gpu_arch.amd_arch(CPU) is None


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), CurrentScaling()])
@pytest.mark.parametrize("cls", [apex_te.Linear, apex_te.LayerNormLinear])
def test_training_step_on_gfx94x(fnuz_device, monkeypatch, cls, recipe):
    """The recipes take the device's formats: every cast makes them, and the numbers are right."""
    made = []
    for quantizer in (DelayedScalingQuantizer, CurrentScalingQuantizer):

        def noting(self, *args, original=quantizer.quantize, **options):
            out = original(self, *args, **options)
            made.append(out[0].rowwise.dtype if out[0].rowwise is not None else self.dtype)
            return out

        monkeypatch.setattr(quantizer, "quantize", noting)
    torch.manual_seed(0)
    layer = cls(32, 48)
    x = torch.randn(16, 32)
    for _ in range(3):  # delayed scaling starts with scale 1
        layer.zero_grad()
        with apex_te.fp8_autocast(fp8_recipe=recipe):
            out = layer(x)
        (out * out.detach()).sum().backward()
    assert set(made) == set(FNUZ)
    plain = layer(x)
    assert sqnr(out, plain) > 20
    got = layer.weight.grad.clone()
    layer.zero_grad()
    (plain * plain.detach()).sum().backward()
    assert sqnr(got, layer.weight.grad) > 15


def sqnr(value, exact):
    noise = (value - exact).double().square().sum()
    return 10 * torch.log10(exact.double().square().sum() / noise).item()


def test_delayed_scale_is_that_of_240(fnuz_device):
    layer, x = apex_te.Linear(32, 48), torch.randn(16, 32)
    recipe = DelayedScaling(amax_history_len=2)
    for _ in range(2):
        with apex_te.fp8_autocast(fp8_recipe=recipe):
            layer(x)
    apex_te.flush_fp8_state()
    amaxes = torch.stack([x.abs().max(), layer.weight.detach().abs().max()])
    torch.testing.assert_close(layer.state_dict()["fp8_state.scale_fwd"][:2], 240.0 / amaxes)


@pytest.mark.cuda
@pytest.mark.skipif(
    torch.version.cuda is None or not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
)
def test_nvidia_gpus_refuse_fnuz():
    x = torch.zeros(16, 16, device="cuda")
    with pytest.raises(TypeError, match="rowwise must have dtype float8_e4m3fn or float8_e5m2"):
        cast_transpose(x, torch.ones(1, device="cuda"), torch.float8_e4m3fnuz)

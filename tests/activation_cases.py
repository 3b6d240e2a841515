"""What the tests of activation and bias_gelu share: shapes and the check of FP8 results."""

from checks import assert_adjacent_codes, assert_close_amax, one

from apex_te.ops.activation import reference_fp8

SHAPES = [(1, 1), (3, 7), (17, 16), (128, 129), (63, 1000), (64, 256), (16, 3584), (5, 4095)]


def check_fp8(output, amax, exact, scale, fp8):
    """An FP8Output and its amax against a float64 result."""
    expected, expected_amax = reference_fp8(exact.cpu(), one(scale), fp8)
    for actual, wanted in zip(output[:2], expected[:2], strict=True):
        if actual is not None:
            assert_adjacent_codes(actual, wanted)
    assert_close_amax(amax, expected_amax)
    assert output.scale_inv.item() == (1 / one(scale)).item()

"""FP8 GEMMs with one scale for each tensor or block: fprop, dgrad and wgrad."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from .. import runtime
from ..runtime.scratch_sizes import GEMM_BYTES as WORKSPACE_BYTES
from ..runtime.tracing import dispatch_modes, is_traced, jit_tracing, transforms_active
from . import gemm_common, gemm_tuning, reference_codec
from .binding import WORKSPACE, Launch, bind, checked, increment_version, note_written
from .block_quantize import ROW_MULTIPLE
from .cast_transpose import cast_transpose
from .gemm_common import bias_dtype as bias_dtype
from .gemm_common import check_addend, float32_product, prepare

_lib = runtime.ops("fp8_gemm")

# cuBLASLt reads FP8 operands in 16-byte units along K and writes N in units of 16.
_MULTIPLE = 16
_SLICE = 128


@checked
def fp8_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    gelu: bool = False,
    accumulate: bool = False,
    use_split_accumulator: bool = False,
    c: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes out[M, N] = gelu((a[M, K] @ b[N, K].T) * a_scale_inv * b_scale_inv + bias) + c.

    Bias, GELU and ``c`` are optional.

    Args:
        a: [M, K] FP8, contiguous. fprop: x; dgrad: dy; wgrad: the columnwise copy of dy.
        b: [N, K] FP8, contiguous. fprop: the weight; dgrad and wgrad: the columnwise copies of the
            weight and x.
        a_scale_inv: one float32 element on the device.
        b_scale_inv: one float32 element on the device.
        out: [M, N] to write, in a dtype listed for ``out_dtype``; a new tensor unless given.
        out_dtype: dtype of a new tensor: bfloat16, float16 or float32.
        bias: [N], converted to out's dtype, or to bfloat16 for a float32 out.
        gelu: apply GELU (tanh form) and also return its input.
        accumulate: add the result to ``out``, which must be given, instead of overwriting it.
        use_split_accumulator: keep partial sums in float32 (slower, more exact); a CPU always does.
        c: [M, N] in the output's dtype, contiguous: a tensor such as a residual, added before
            rounding; not with ``gelu`` or ``accumulate``.

    Returns:
        The output [M, N], ``out`` or a new tensor. With ``gelu`` a tuple (output, input of GELU),
        both of one shape and dtype.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match.
        NotImplementedError: both operands are E5M2, or the GPU has no FP8 matrix units (below
            sm_89).
    """
    is_given = out is not None
    out, bias = prepare("fp8_gemm", a, b, out, out_dtype, bias, accumulate)
    if c is not None:
        check_addend("fp8_gemm", c, out, accumulate, gelu)
    aux = torch.empty_like(out) if gelu else None
    multiply_into(
        a, b, a_scale_inv, b_scale_inv, out, bias, c, aux, accumulate, use_split_accumulator
    )
    if is_given:
        note_written(out)
    return out if aux is None else (out, aux)


@checked
def block_scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *,
    a_block_rows: int = 1,
    b_block_rows: int = 128,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes out[M, N] = a @ b.T + bias + c of operands from ``block_quantize``.

    The GEMM is split into slices of 128 along K. Each slice is (a @ b.T) * a_scale_inv *
    b_scale_inv with the scales of its blocks, and slices are summed in float32.

    fprop multiplies x (blocks of 1x128) by the weight (128x128). dgrad multiplies dy (1x128) by the
    weight's columnwise copy (128x128). wgrad multiplies columnwise copies of dy and x (both 1x128).

    cuBLASLt needs M to be a multiple of 4. Another M is padded. This takes no copies if ``out`` is
    None and the storage of ``a`` includes the added rows, as in a rowwise copy from
    ``block_quantize``.

    Args:
        a: [M, K] FP8, contiguous.
        b: [N, K] FP8, contiguous.
        a_scale_inv: float32 of shape block_quantize.scale_shape(M, K, a_block_rows).
        b_scale_inv: float32 of shape block_quantize.scale_shape(N, K, b_block_rows).
        a_block_rows: 1 (blocks of 1x128) or 128 (128x128).
        b_block_rows: 1 or 128, but not 128 if ``a_block_rows`` is 128.
        out: [M, N] to write, in a dtype listed for ``out_dtype``; a new tensor unless given.
        out_dtype: dtype of a new tensor: bfloat16, float16 or float32.
        bias: [N], converted to out's dtype, or to bfloat16 for a float32 out.
        accumulate: add the result to ``out``, which must be given, instead of overwriting it.
        c: [M, N] in the output's dtype, contiguous: a tensor such as a residual, added before
            rounding; not with ``accumulate``.

    Returns:
        The output [M, N]: ``out`` or the new tensor.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: the shape or device of an argument does not match.
        NotImplementedError: both operands are E5M2, both have blocks of 128x128, or the GPU is not
            sm_90.
    """
    rows, is_given = a.shape[0], out is not None
    spare = 0 if is_given or torch.compiler.is_compiling() else -rows % ROW_MULTIPLE
    out, bias = prepare("block_scaled_gemm", a, b, out, out_dtype, bias, accumulate, spare)
    if c is not None:
        check_addend("block_scaled_gemm", c, out[:rows], accumulate, False)
    _multiply_blocks(
        a, b, a_scale_inv, b_scale_inv, out, bias, c, a_block_rows, b_block_rows, accumulate
    )
    if is_given:
        note_written(out)
    return _first_rows(out, rows) if spare else out


def bound_product(
    b: torch.Tensor,
    b_scale_inv: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    use_split_accumulator: bool,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Prepares GEMMs of several left operands with one right operand, to save host time.

    Checks and look-ups that depend only on the right operand are done once, here. The returned
    ``product(a, a_scale_inv, out)`` computes ``fp8_gemm`` into ``out`` and returns it. Call it only
    on the stream that is current now, and not in traced code. It is None if such a GEMM takes more
    than one kernel launch, or if this call is traced.
    """
    if is_traced() or forward_ad._current_level >= 0:
        return None  # first, since a traced tensor may have no address
    if not _launches_at_once(b) or not _right_is_taken(b):
        return None
    bias = None if bias is None else bias.to(bias_dtype(out_dtype))
    scratch, gemm = runtime.workspace(b.device, WORKSPACE_BYTES), _lib.fp8_gemm
    count = gemm_common.count_gemms

    def product(a: torch.Tensor, a_scale_inv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if not _left_is_taken(a, out):
            fp8_gemm(
                a, b, a_scale_inv, b_scale_inv, out=out, bias=bias,
                use_split_accumulator=use_split_accumulator,
            )  # fmt: skip
            return out
        count()
        gemm(
            a, b, a_scale_inv, b_scale_inv, out, bias, None, None, scratch, False,
            use_split_accumulator, 0,
        )  # fmt: skip
        increment_version((out,))
        return out

    return product


def _first_rows(out: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns the first rows of ``out``, which only the caller may have, but not as a view.

    ``out`` is resized, or copied under a tracer or a transform: autograd refuses in-place changes
    of a view that an autograd function returned.
    """
    if transforms_active() or dispatch_modes() or jit_tracing():
        return out[:rows].clone()
    return out.resize_(rows, out.shape[1])


def _run(a, b, a_scale_inv, b_scale_inv, out, bias, c, aux, accumulate, use_split_accumulator):
    gemm_common.count_gemms()
    operands = (a, b, a_scale_inv, b_scale_inv)
    if a.is_cuda and is_taken(a, b, c, out):
        _run_cuda(operands, out, bias, c, aux, accumulate, use_split_accumulator)
    elif a.shape[1] == 0 or out.numel() == 0:
        run_empty(out, bias, c, aux, accumulate)
    elif a.is_cuda:
        _run_padded(operands, out, bias, c, aux, accumulate, use_split_accumulator)
    else:
        _run_cpu(a, b, a_scale_inv, b_scale_inv, out, bias, c, aux, accumulate)


def is_taken(a, b, c, out) -> bool:
    """Returns True if cuBLASLt takes the operands as they are, without padding or copies."""
    if c is not None and c.data_ptr() % _MULTIPLE:
        return False
    return _right_is_taken(b) and _left_is_taken(a, out)


def _right_is_taken(b) -> bool:
    """Returns True if cuBLASLt takes ``b``: address, N and K divisible by 16, and K above 0."""
    cols, depth = b.shape
    return depth > 0 and not (cols | depth | b.data_ptr()) % _MULTIPLE


def _left_is_taken(a, out) -> bool:
    """Returns True if cuBLASLt takes left operand and output: aligned, and not without elements."""
    return not (a.data_ptr() | out.data_ptr()) % _MULTIPLE and out.numel() > 0


def _launches_at_once(b) -> bool:
    """Returns True if GEMMs run on a GPU and by an algorithm that needs no timing."""
    return b.is_cuda and not gemm_tuning.is_active


def _launch(a, b, a_scale_inv, b_scale_inv, out, bias, c, aux, accumulate, use_split_accumulator):
    """Returns the ``Launch`` of the one C function that ``_run`` would call; None if it does more.

    That is padding, GELU, an empty result, an algorithm chosen by timing, or the CPU.
    """
    if aux is not None or not _launches_at_once(b) or not is_taken(a, b, c, out):
        return None
    operands, options = (a, b, a_scale_inv, b_scale_inv), (accumulate, use_split_accumulator, 0)
    return Launch(_lib.fp8_gemm, (*operands, out, bias, c, None, WORKSPACE, *options), 1)


def _run_cuda(operands, out, bias, c, aux, accumulate, use_split_accumulator):
    scratch = runtime.workspace(out.device, WORKSPACE_BYTES)
    index = 0
    if gemm_tuning.is_active:
        index = _tuned_algorithm(operands, out, bias, c, aux, accumulate, use_split_accumulator)
    options = (scratch, accumulate, use_split_accumulator, index)
    if aux is None:
        _lib.fp8_gemm(*operands, out, bias, c, None, *options)
        return
    try:
        _lib.fp8_gemm(*operands, out, bias, None, aux, *options)
    except NotImplementedError:
        # cuBLASLt has no fused GELU for this combination of types: GEMM, then the activation.
        _lib.fp8_gemm(*operands, aux, bias, None, None, scratch, False, use_split_accumulator, 0)
        out.copy_(F.gelu(aux, approximate="tanh"))


def _key(operands, out, bias, accumulate) -> str:
    """Returns the beginning of a GEMM's key in ``gemm_tuning``, the same with and without ``c``."""
    a, b = operands[:2]
    return (
        f"{a.shape[0]}x{b.shape[0]}x{a.shape[1]} {a.dtype} {b.dtype} {out.dtype} "
        f"bias={bias is not None} accumulate={accumulate}"
    )


def _tuned_algorithm(operands, out, bias, c, aux, accumulate, use_split_accumulator) -> int:
    a = operands[0]
    key = (
        f"{_key(operands, out, bias, accumulate)} gelu={aux is not None} "
        f"split={use_split_accumulator}"
    )

    def launch(index: int) -> None:
        results = torch.empty_like(out), None if aux is None else torch.empty_like(aux)
        scratch = runtime.workspace(a.device, WORKSPACE_BYTES)
        _lib.fp8_gemm(
            *operands, results[0], bias, c, results[1], scratch, accumulate, use_split_accumulator,
            index,
        )  # fmt: skip

    return gemm_tuning.algorithm(key, a.device, launch)


def tune(
    shapes: Iterable[tuple[int, int, int]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    grad_dtype: torch.dtype = torch.float8_e5m2,
    device: torch.device | str = "cuda",
    block_seconds: float = 0.3,
) -> None:
    """Benchmarks cuBLASLt's algorithms for GEMMs of linear layers; later GEMMs use the fastest.

    Args:
        shapes: (tokens, in_features, out_features) of each layer.
        dtype: dtype of activations and outputs; wgrad is tuned for this dtype and for accumulation
            into float32.
        grad_dtype: FP8 dtype of output gradients, float8_e5m2 (HYBRID) or float8_e4m3fn.
        device: a CUDA device.
        block_seconds: seconds for which each algorithm runs in each of its turns, under load.
            Tuning one GEMM takes about 15 times as long.

    Later processes read the choices from the user's cache if ``APEX_TE_GEMM_TUNE=1`` is set.

    Raises:
        ValueError: ``block_seconds`` is not above 0.
    """
    if not block_seconds > 0.0:
        raise ValueError(f"tune: block_seconds must be above 0, got {block_seconds}")
    gemm_tuning.is_active = True
    e4m3 = torch.float8_e4m3fn
    one = torch.ones(1, device=device)

    def operand(rows: int, cols: int, fp8: torch.dtype) -> torch.Tensor:
        x = torch.randn(rows, cols, device=device, dtype=torch.bfloat16)
        fp8_data = torch.empty_like(x, dtype=fp8)
        cast_transpose(x, one * 64, fp8, columnwise=False, out_rowwise=fp8_data)
        return fp8_data

    usual, gemm_tuning.block_seconds = gemm_tuning.block_seconds, block_seconds
    try:
        for tokens, inputs, outputs in shapes:
            x, w = operand(tokens, inputs, e4m3), operand(outputs, inputs, e4m3)
            fp8_gemm(x, w, one, one, out_dtype=dtype)
            dy, wt = operand(tokens, outputs, grad_dtype), operand(inputs, outputs, e4m3)
            fp8_gemm(dy, wt, one, one, out_dtype=dtype, use_split_accumulator=True)
            dyt, xt = operand(outputs, tokens, grad_dtype), operand(inputs, tokens, e4m3)
            fp8_gemm(dyt, xt, one, one, out_dtype=dtype, use_split_accumulator=True)
            total = torch.zeros(outputs, inputs, device=device)
            fp8_gemm(dyt, xt, one, one, out=total, accumulate=True, use_split_accumulator=True)
    finally:
        gemm_tuning.block_seconds = usual


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns a copy of an FP8 operand [M, K], zero-padded to [M + rows, K rounded up to 16]."""
    return F.pad(x.view(torch.uint8), (0, -x.shape[1] % _MULTIPLE, 0, rows)).view(x.dtype)


def _run_padded(operands, out, bias, c, aux, accumulate, use_split_accumulator):
    """Runs a GEMM with K and N zero-padded to multiples of 16, and drops the added columns."""
    a, b, a_scale_inv, b_scale_inv = operands
    cols = b.shape[0]
    pad_n = -cols % _MULTIPLE
    wide = out.new_empty((out.shape[0], cols + pad_n))
    wide_aux = None if aux is None else torch.empty_like(wide)
    wide_bias = None if bias is None else F.pad(bias, (0, pad_n))
    # Not the start of an accumulation: cuBLASLt rounds a GEMM before it adds it in place.
    wide_c = None if c is None else F.pad(c, (0, pad_n))
    if accumulate:
        wide[:, :cols].copy_(out)
        wide[:, cols:].zero_()
    padded = (_padded(a, 0), _padded(b, pad_n), a_scale_inv, b_scale_inv)
    _run_cuda(padded, wide, wide_bias, wide_c, wide_aux, accumulate, use_split_accumulator)
    out.copy_(wide[:, :cols])
    if aux is not None and wide_aux is not None:
        aux.copy_(wide_aux[:, :cols])


def decoded(op: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the float32 values, without scale_inv, of both operands of a GEMM on the CPU."""
    for name, operand in (("a", a), ("b", b)):
        if not operand.is_contiguous():
            raise ValueError(
                f"{op}: {name} must be contiguous, got strides {list(operand.stride())}"
            )
        values = torch.empty(operand.shape, dtype=torch.float32)
        _lib.fp8_decode(operand, values)
        yield values


def _run_cpu(a, b, a_scale_inv, b_scale_inv, out, bias, c, aux, accumulate):
    a, b = decoded("fp8_gemm", a, b)
    product = float32_product(a, b.t())
    _lib.fp8_gemm_epilogue(product, a_scale_inv, b_scale_inv, out, bias, c, aux, accumulate)


def _run_block(
    a, b, a_scale_inv, b_scale_inv, out, bias, c, a_block_rows, b_block_rows, accumulate
):
    """Runs a block-scaled GEMM, on a GPU with padded operands if needed.

    ``out`` is [M, N], or [M rounded up to ``ROW_MULTIPLE``, N], whose last rows mean nothing.
    """
    gemm_common.count_gemms()
    operands, blocks = (a, b, a_scale_inv, b_scale_inv), (a_block_rows, b_block_rows)
    if a.is_cuda and _blocks_are_taken(operands, c, out):
        run = _run_block_rows if a.shape[0] % ROW_MULTIPLE else _run_block_cuda
        run(operands, out, bias, c, blocks, accumulate)
    elif a.shape[1] == 0 or out.numel() == 0:
        run_empty(out[: a.shape[0]], bias, c, None, accumulate)
    elif a.is_cuda:
        _run_block_padded(operands, out[: a.shape[0]], bias, c, blocks, accumulate)
    else:
        _run_block_cpu(operands, out[: a.shape[0]], bias, c, blocks, accumulate)


def _blocks_are_taken(operands, c, out) -> bool:
    """Returns True if cuBLASLt takes operands and scales, aligned to 16 bytes, whatever M is."""
    a, b, a_scale_inv, b_scale_inv = operands
    scales = a_scale_inv.data_ptr() | b_scale_inv.data_ptr()
    return is_taken(a, b, c, out) and not scales % _MULTIPLE


def _launch_block(
    a, b, a_scale_inv, b_scale_inv, out, bias, c, a_block_rows, b_block_rows, accumulate
):
    """Returns the ``Launch`` of the one C function of ``_run_block``; None if it does more."""
    operands, blocks = (a, b, a_scale_inv, b_scale_inv), (a_block_rows, b_block_rows)
    if not _launches_at_once(b) or not _blocks_are_taken(operands, c, out):
        return None
    if a.shape[0] % ROW_MULTIPLE:
        return None
    options = (*blocks, accumulate, 0)
    return Launch(_lib.fp8_gemm_block, (*operands, out, bias, c, WORKSPACE, *options), 1)


def _run_block_cuda(operands, out, bias, c, blocks, accumulate):
    def launch(index: int, result: torch.Tensor = out) -> None:
        scratch = runtime.workspace(out.device, WORKSPACE_BYTES)
        _lib.fp8_gemm_block(*operands, result, bias, c, scratch, *blocks, accumulate, index)

    index = 0
    if gemm_tuning.is_active:
        key = f"{_key(operands, out, bias, accumulate)} blocks={blocks}"
        index = gemm_tuning.algorithm(
            key, out.device, lambda index: launch(index, torch.empty_like(out))
        )
    launch(index)


def _run_block_rows(operands, out, bias, c, blocks, accumulate):
    """Runs a block-scaled GEMM with M rounded up to ``ROW_MULTIPLE``, as cuBLASLt needs it.

    The added rows of ``a`` are bytes after it in its storage, or zeros; no one reads their
    results.
    """
    a, b, a_scale_inv, b_scale_inv = operands
    rows, k = a.shape
    stored = rows + -rows % ROW_MULTIPLE
    room = a.untyped_storage().nbytes() - a.storage_offset()  # elements of one byte
    if a.is_contiguous() and room >= stored * k:
        a = a.as_strided((stored, k), (k, 1))
    else:
        a = F.pad(a.view(torch.uint8), (0, 0, 0, stored - rows)).view(a.dtype)
    operands = a, b, a_scale_inv, b_scale_inv  # which are laid out for ``stored`` rows
    if c is not None:  # apart from ``out``, as in ``_run_padded``
        c = F.pad(c, (0, 0, 0, stored - rows))
    if out.shape[0] == stored:
        _run_block_cuda(operands, out, bias, c, blocks, accumulate)
        return
    whole = out.new_empty((stored, out.shape[1]))
    if accumulate:
        whole[:rows].copy_(out)
    _run_block_cuda(operands, whole, bias, c, blocks, accumulate)
    out.copy_(whole[:rows])


def _run_block_padded(operands, out, bias, c, blocks, accumulate):
    """Runs a block-scaled GEMM with M, N and K padded with zeros to multiples of 16."""
    a, b, a_scale_inv, b_scale_inv = operands
    rows, cols = out.shape
    pad_m, pad_n = -rows % _MULTIPLE, -cols % _MULTIPLE

    def scales(scale_inv: torch.Tensor, rows: int, block_rows: int) -> torch.Tensor:
        missing = rows - scale_inv.shape[1] if block_rows == 1 else 0
        return F.pad(scale_inv, (0, missing)).clone()

    wide = out.new_zeros((rows + pad_m, cols + pad_n))
    # Apart from ``out``, as in ``_run_padded``.
    wide_c = None if c is None else F.pad(c, (0, pad_n, 0, pad_m))
    if accumulate:
        wide[:rows, :cols].copy_(out)
    padded = (
        _padded(a, pad_m),
        _padded(b, pad_n),
        scales(a_scale_inv, rows + pad_m, blocks[0]),
        scales(b_scale_inv, cols + pad_n, blocks[1]),
    )
    wide_bias = None if bias is None else F.pad(bias, (0, pad_n))
    _run_block_cuda(padded, wide, wide_bias, wide_c, blocks, accumulate)
    out.copy_(wide[:rows, :cols])


def _run_block_cpu(operands, out, bias, c, blocks, accumulate):
    a, b = decoded("block_scaled_gemm", *operands[:2])
    total = out.new_zeros(out.shape, dtype=torch.float32)
    for i in range(-(-a.shape[1] // _SLICE)):
        part = slice(i * _SLICE, (i + 1) * _SLICE)
        product = float32_product(a[:, part], b[:, part].t())
        _lib.fp8_block_accumulate(product, *operands[2:], total, *blocks, a.shape[1], i)
    one = torch.ones(1)
    _lib.fp8_gemm_epilogue(total, one, one, out, bias, c, None, accumulate)


def run_empty(out, bias, c, aux, accumulate):
    """Writes the result of a GEMM with K = 0 or without elements: bias + c, or zeros."""
    if accumulate or out.numel() == 0:
        return
    value = torch.zeros_like(out) if bias is None else bias.to(out.dtype).expand_as(out)
    if aux is not None:
        aux.copy_(value)
        value = F.gelu(value, approximate="tanh")
    out.copy_(value if c is None else value.float() + c.float())


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``fp8_gemm`` without GELU in float64 from the decoded operands.

    a is [M, K] and b [N, K] FP8, each with a scale_inv of one element; ``bias`` is [N] and ``c``
    [M, N]. Returns float64 [M, N].
    """
    product = reference_codec.decode_fp8(a).double() @ reference_codec.decode_fp8(b).double().t()
    product = product * (a_scale_inv.double() * b_scale_inv.double())
    product = product if bias is None else product + bias.double()
    return product if c is None else product + c.double()


multiply_into = bind(
    "fp8_gemm", "fp8_gemm", _run, without=("workspace", "algorithm"), launch=_launch
)
_multiply_blocks = bind(
    "fp8_gemm",
    "fp8_gemm_block",
    _run_block,
    without=("workspace", "algorithm"),
    launch=_launch_block,
)

"""Python functions of the ops: one module for each op, which calls its kernels.

Most modules have a ``reference`` in plain PyTorch, too. ``import apex_te`` suffices for all of
them: a module is imported when its name is first used, e.g. ``apex_te.ops.rms_norm.rms_norm``.
"""

import typing as _typing

from ..runtime.imports import attach_submodules as _attach

if _typing.TYPE_CHECKING:  # for type checkers; at run time each module is imported on first use
    from . import activation as activation
    from . import amax_scale_update as amax_scale_update
    from . import attention_sink as attention_sink
    from . import batch_norm as batch_norm
    from . import bias_dropout_add as bias_dropout_add
    from . import bias_gelu as bias_gelu
    from . import block_quantize as block_quantize
    from . import byte_transpose as byte_transpose
    from . import cast_transpose as cast_transpose
    from . import cross_entropy as cross_entropy
    from . import current_scale as current_scale
    from . import dense_gemm as dense_gemm
    from . import dense_gemm_gelu as dense_gemm_gelu
    from . import dense_gemm_swiglu as dense_gemm_swiglu
    from . import emulated_gemm as emulated_gemm
    from . import focal_loss as focal_loss
    from . import fp8_gemm as fp8_gemm
    from . import gemm_common as gemm_common
    from . import grouped_cast as grouped_cast
    from . import grouped_gemm as grouped_gemm
    from . import grouped_quantize as grouped_quantize
    from . import hif8 as hif8
    from . import index_mul_2d as index_mul_2d
    from . import layer_norm as layer_norm
    from . import moe_permute as moe_permute
    from . import moe_router as moe_router
    from . import multi_tensor as multi_tensor
    from . import multi_tensor_optim as multi_tensor_optim
    from . import mx_quantize as mx_quantize
    from . import peer_exchange as peer_exchange
    from . import qkv_cast as qkv_cast
    from . import rms_norm as rms_norm
    from . import rope as rope
    from . import row_quantize as row_quantize
    from . import rowwise_gemm as rowwise_gemm
    from . import scaled_softmax as scaled_softmax
    from . import swiglu as swiglu
    from . import swiglu_block as swiglu_block
    from . import transducer_joint as transducer_joint
    from . import transducer_loss as transducer_loss
    from . import wgrad_gemm as wgrad_gemm

if not _typing.TYPE_CHECKING:  # type checkers know the names above, and no others
    __getattr__, __dir__ = _attach(__name__)

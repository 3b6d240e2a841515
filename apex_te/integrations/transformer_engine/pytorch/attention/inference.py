"""Transformer Engine's InferenceParams over apex_te's."""

from __future__ import annotations

from typing import Any

import torch

from .....module.attention.inference_params import InferenceParams as NativeInferenceParams
from .....module.attention.inference_params import extended
from ..._device import default_device
from ..._names import named, neutral, not_served

__all__ = ["InferenceParams", "KVCacheManager", "NonPagedKVCacheManager", "PagedKVCacheManager"]

_MODULE = "transformer_engine.pytorch.attention.inference"


@named(_MODULE)
class KVCacheManager:
    """Holder of the keys and values of an ``InferenceParams``, for code that looks for it there."""

    def __init__(self, params: NativeInferenceParams) -> None:
        self._params = params

    @property
    def cache(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Returns (keys, values) by the layer's number, each [b, s, g, d]; entries may be set."""
        return self._params.key_value_memory_dict

    @property
    def sequences(self) -> Any:
        """Returns the sequences of the latest ``pre_step`` with their numbers of tokens."""
        return self._params.sequences


@named(_MODULE)
class NonPagedKVCacheManager(KVCacheManager):
    """``KVCacheManager`` with one row of memory for each sequence."""


PagedKVCacheManager = not_served(
    f"{_MODULE}.PagedKVCacheManager",
    "keys and values are not held in pages; leave is_paged=False",
    KVCacheManager,
)


@named(_MODULE)
class InferenceParams(NativeInferenceParams):
    """Cache of keys and values while generating, with Transformer Engine's interface.

    Args:
        max_batch_size, max_sequence_length: sequences and tokens that there is room for.
        num_heads_kv, head_dim_k, head_dim_v, dtype: heads of keys and values, their sizes and their
            dtype, for ``allocate_memory``; a layer allocates without them.
        is_paged: must be False; ``total_num_pages`` and ``page_size`` then have no effect.
        max_ctx_len: has no effect.
        qkv_format: layout of the layers' inputs; they say it themselves.
        custom_cache_manager: must be None.
    """

    _is_batch_first = True

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
    ) -> None:
        neutral(
            "InferenceParams",
            is_paged=(is_paged, False),
            custom_cache_manager=(custom_cache_manager, None),
        )
        super().__init__(max_batch_size, max_sequence_length)
        self.num_heads_kv = num_heads_kv
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.dtype = dtype
        self.is_paged = False
        self.max_ctx_len = max_ctx_len
        self.input_qkv_format = qkv_format
        self.cache_manager = NonPagedKVCacheManager(self)

    def __repr__(self) -> str:
        return (
            f"InferenceParams(max_batch_size={self.max_batch_size}, "
            f"max_sequence_length={self.max_sequence_length}, num_heads_kv={self.num_heads_kv}, "
            f"head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v}, dtype={self.dtype})"
        )

    @property
    def batch_size(self) -> int:
        """Returns the number of sequences of the latest ``pre_step``."""
        return len(self.sequences)

    def allocate_memory(self, layer_number: int) -> None:
        """Makes the memory of a layer's keys and values, [b, s, g, d] each.

        It lies on PyTorch's default device if one is set, else on the current GPU, and on the CPU
        where there is none. A layer that computes elsewhere moves it to its device.
        """
        sizes = (self.head_dim_k, self.head_dim_v)
        if self.num_heads_kv is None or sizes[0] is None or self.dtype is None:
            raise ValueError(
                "InferenceParams: num_heads_kv, head_dim_k and dtype must be given for "
                f"allocate_memory, got {self.num_heads_kv}, {self.head_dim_k} and {self.dtype}"
            )
        lead = (self.max_batch_size, self.max_sequence_length, self.num_heads_kv)
        device: Any = default_device(None)
        keys, values = (
            torch.zeros(*lead, size or sizes[0], dtype=self.dtype, device=device) for size in sizes
        )
        self.key_value_memory_dict[layer_number] = (keys, values)
        self.table(keys.device)

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """Returns the tokens cached before the latest ``pre_step``, int32 [max_batch_size].

        Later steps overwrite the tensor, which CUDA graphs may read.
        """
        device: Any = default_device(None)
        return self.table(torch.empty(0, device=device).device)[0, :-1]

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, str]:
        """Caches new keys and values of a layer, of the tokens that ``pre_step`` has announced.

        Returns:
            ``(keys, values, cu_seqlens_q, cu_seqlens_kv, max_seqlen_kv, qkv_format)``: the memory
            of keys and values of the sequences, [b, s, g, d]; where the new tokens and all tokens
            of each sequence begin, int32 [b + 1]; ``max_sequence_length``; and the layouts of the
            inputs and of the memory, as ``"bshd"`` or ``"thd_2bshd"``.
        """
        step = self.step_lengths
        if step is None:
            raise ValueError("InferenceParams: pre_step must be called before step")
        extended("InferenceParams", self, layer_number, new_k, new_v, qkv_format)
        keys, values = self.key_value_memory_dict[layer_number]
        rows, device = len(step.new), new_k.device
        layouts = "bshd" if qkv_format == "bshd" else f"{qkv_format}_2bshd"
        starts = (step.cu_new(device), step.cu_total(device))
        return keys[:rows], values[:rows], *starts, self.max_sequence_length, layouts

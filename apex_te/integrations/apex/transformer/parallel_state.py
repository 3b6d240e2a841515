"""Process groups of tensor, pipeline and data parallelism, and this process's ranks in them.

Rank r of the world has tensor-parallel rank r % tp; then data-parallel ranks follow, and pipeline
stages are the slowest. Getters of groups raise RuntimeError before ``initialize_model_parallel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import distributed

from .log_util import get_transformer_logger

_logger = get_transformer_logger(__name__)
_groups: dict[str, Any] = {}
_ranks: dict[str, list[int]] = {}  # of the world, of this process's group
# what set_* functions set in place of the groups' sizes and ranks
_override: dict[str, int | None] = {}
_virtual: dict[str, int | None] = {"rank": None, "size": None}
_split_rank: int | None = None


def is_unitialized() -> bool:
    """Returns True before ``initialize_model_parallel``; the name is apex's."""
    return "data" not in _groups


def model_parallel_is_initialized() -> bool:
    """Returns True after ``initialize_model_parallel``."""
    return "data" in _groups


def _make(name: str, groups: Sequence[Sequence[int]], backend: str | None) -> None:
    """Makes one kind of groups, by all processes in one order, and keeps this process's."""
    rank = distributed.get_rank()
    for ranks in groups:
        group = distributed.new_group(list(ranks), backend=backend)
        if rank in ranks:
            _groups[name], _ranks[name] = group, list(ranks)


def initialize_model_parallel(
    tensor_model_parallel_size_: int = 1,
    pipeline_model_parallel_size_: int = 1,
    virtual_pipeline_model_parallel_size_: int | None = None,
    pipeline_model_parallel_split_rank_: int | None = None,
    *,
    default_backend: str | None = None,
    p2p_backend: str | None = None,
) -> None:
    """Makes the process groups of tensor, pipeline and data parallelism, on all ranks of the world.

    Args:
        tensor_model_parallel_size_: ranks that share each layer; at most the world's size.
        pipeline_model_parallel_size_: stages of layers; at most the world's size.
        virtual_pipeline_model_parallel_size_: model chunks per stage, for the interleaved schedule.
        pipeline_model_parallel_split_rank_: stage at which a decoder follows an encoder.
        default_backend: backend of all groups but the pipeline's; None for that of the world.
        p2p_backend: backend of the pipeline's groups; None for that of the world.

    Raises:
        RuntimeError: torch.distributed is not initialised, the groups exist already, or the sizes
            do not divide the world's.
        ValueError: an interleaved schedule over fewer than 2 stages, or over 2 with NCCL, which
            cannot tell messages of the two directions apart.
    """
    global _split_rank
    if not distributed.is_initialized():
        raise RuntimeError("initialize_model_parallel: torch.distributed must be initialised first")
    if model_parallel_is_initialized():
        raise RuntimeError(
            "initialize_model_parallel: the groups already exist; call destroy_model_parallel() "
            "first"
        )
    world = distributed.get_world_size()
    tensor = min(tensor_model_parallel_size_, world)
    pipeline = min(pipeline_model_parallel_size_, world)
    if world % (tensor * pipeline):
        raise RuntimeError(
            "initialize_model_parallel: tensor_model_parallel_size_ * pipeline_model_parallel_size_"
            f" = {tensor * pipeline} must divide the world's size {world}"
        )
    if virtual_pipeline_model_parallel_size_ is not None:
        is_nccl = "nccl" in (p2p_backend or distributed.get_backend())
        if pipeline < 2 + is_nccl:
            raise ValueError(
                f"initialize_model_parallel: pipeline_model_parallel_size_ must be at least"
                f" {2 + is_nccl} for the interleaved schedule, got {pipeline}"
            )
        _virtual.update(rank=0, size=virtual_pipeline_model_parallel_size_)
    _split_rank = split = pipeline_model_parallel_split_rank_
    stage = world // pipeline
    data = [
        range(start + rank, start + stage, tensor)
        for start in range(0, world, stage)
        for rank in range(tensor)
    ]
    pipelines = [list(range(rank, world, stage)) for rank in range(stage)]
    _make("data", data, default_backend)
    _make("model", list(zip(*data, strict=True)), default_backend)
    tensors = [range(start, start + tensor) for start in range(0, world, tensor)]
    _make("tensor", tensors, default_backend)
    _make("pipeline", pipelines, p2p_backend)

    def those(*stages: int) -> list[list[int]]:
        """Returns, for each pipeline, the ranks of some stages without repetition."""
        return [list(dict.fromkeys(ranks[each] for each in stages)) for ranks in pipelines]

    split_stages = () if split is None else (split,)
    _make("embedding", those(0, *split_stages, -1), default_backend)
    _make("position_embedding", those(0, *split_stages), default_backend)
    encoder = range(split) if split else (0,)
    decoder = range(split, pipeline) if split is not None else (0,)
    _make("encoder_relative_position_embedding", those(*encoder), default_backend)
    _make("decoder_relative_position_embedding", those(*decoder), default_backend)
    if distributed.get_rank() == 0:
        sizes = (tensor, pipeline, world // (tensor * pipeline))
        _logger.info("tensor, pipeline and data parallel over %d, %d and %d ranks", *sizes)


def destroy_model_parallel() -> None:
    """Forgets the groups, sizes and ranks, so that they can be recreated."""
    global _split_rank
    _groups.clear()
    _ranks.clear()
    _override.clear()
    _virtual.update(rank=None, size=None)
    _split_rank = None


def _group(name: str) -> Any:
    """Returns one of this process's groups."""
    if is_unitialized():
        raise RuntimeError(
            f"parallel_state: the {name} group does not exist, call initialize_model_parallel()"
        )
    return _groups.get(name)


def _size(name: str) -> int:
    """Returns the size that was set, else that of a group."""
    size = _override.get(f"{name} size")
    return distributed.get_world_size(_group(name)) if size is None else size


def _rank(name: str) -> int:
    """Returns the rank that was set, else that in a group."""
    rank = _override.get(f"{name} rank")
    return distributed.get_rank(_group(name)) if rank is None else rank


def get_rank_info() -> tuple[int, int, int, int | None]:
    """Returns the data, tensor, pipeline and virtual pipeline rank, zeros before initialisation."""
    if is_unitialized():
        return 0, 0, 0, 0
    return _rank("data"), _rank("tensor"), _rank("pipeline"), _virtual["rank"]


def get_model_parallel_group() -> Any:
    """Returns the group of the ranks that hold parts of one model."""
    return _group("model")


def get_tensor_model_parallel_group() -> Any:
    """Returns the group of the ranks that share each layer."""
    return _group("tensor")


def get_pipeline_model_parallel_group() -> Any:
    """Returns the group of the ranks with the stages of one pipeline."""
    return _group("pipeline")


def get_data_parallel_group() -> Any:
    """Returns the group of the ranks with the same part of the model."""
    return _group("data")


def get_embedding_group() -> Any:
    """Returns the group of the first and last stage, None on other stages."""
    return _group("embedding")


def get_position_embedding_group() -> Any:
    """Returns the group of the stages with position embeddings, None on other stages."""
    return _group("position_embedding")


def get_encoder_relative_position_embedding_group() -> Any:
    """Returns the group of the encoder's stages, None on other stages."""
    return _group("encoder_relative_position_embedding")


def get_decoder_relative_position_embedding_group() -> Any:
    """Returns the group of the decoder's stages, None on other stages."""
    return _group("decoder_relative_position_embedding")


def is_rank_in_embedding_group(ignore_virtual: bool = False) -> bool:
    """Returns True if this stage, or this chunk of it, has a copy of the embedding."""
    if _group("embedding") is None:
        return False
    ranks, rank = _ranks["embedding"], distributed.get_rank()
    if ignore_virtual:
        return True
    if rank == ranks[0]:
        return is_pipeline_first_stage()
    return is_pipeline_last_stage() if rank == ranks[-1] else True


def is_rank_in_position_embedding_group() -> bool:
    """Returns True if this stage has position embeddings."""
    return _group("position_embedding") is not None


def is_rank_in_encoder_relative_position_embedding_group() -> bool:
    """Returns True if this stage is in the encoder's group."""
    return _group("encoder_relative_position_embedding") is not None


def is_rank_in_decoder_relative_position_embedding_group() -> bool:
    """Returns True if this stage is in the decoder's group."""
    return _group("decoder_relative_position_embedding") is not None


def get_tensor_model_parallel_world_size() -> int:
    """Returns the number of tensor-parallel ranks."""
    return _size("tensor")


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Sets what ``get_tensor_model_parallel_world_size`` returns; None for the group's size."""
    _override["tensor size"] = world_size


def get_tensor_model_parallel_rank() -> int:
    """Returns the tensor-parallel rank."""
    return _rank("tensor")


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Sets what ``get_tensor_model_parallel_rank`` returns; None for the rank in the group."""
    _override["tensor rank"] = rank


def get_pipeline_model_parallel_world_size() -> int:
    """Returns the number of pipeline stages."""
    return _size("pipeline")


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Sets what ``get_pipeline_model_parallel_world_size`` returns; None for the group's size."""
    _override["pipeline size"] = world_size


def get_pipeline_model_parallel_rank() -> int:
    """Returns the pipeline stage, from 0."""
    return _rank("pipeline")


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Sets what ``get_pipeline_model_parallel_rank`` returns; None for the rank in the group."""
    _override["pipeline rank"] = rank


def get_data_parallel_world_size() -> int:
    """Returns the number of data-parallel ranks."""
    return _size("data")


def get_data_parallel_rank() -> int:
    """Returns the data-parallel rank."""
    return _rank("data")


def get_tensor_model_parallel_src_rank() -> int:
    """Returns the world's rank of the first rank of the tensor-parallel group."""
    _group("tensor")
    return _ranks["tensor"][0]


def get_data_parallel_src_rank() -> int:
    """Returns the world's rank of the first rank of the data-parallel group."""
    _group("data")
    return _ranks["data"][0]


def _stage_rank(stage: int) -> int:
    """Returns the world's rank of a stage of this pipeline."""
    _group("pipeline")
    return _ranks["pipeline"][stage]


def get_pipeline_model_parallel_first_rank() -> int:
    """Returns the world's rank of the first stage."""
    return _stage_rank(0)


def get_pipeline_model_parallel_last_rank() -> int:
    """Returns the world's rank of the last stage."""
    return _stage_rank(-1)


def get_pipeline_model_parallel_next_rank() -> int:
    """Returns the world's rank of the next stage; the first follows the last."""
    return _stage_rank((_rank("pipeline") + 1) % _size("pipeline"))


def get_pipeline_model_parallel_prev_rank() -> int:
    """Returns the world's rank of the previous stage; the last precedes the first."""
    return _stage_rank((_rank("pipeline") - 1) % _size("pipeline"))


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Returns the index of the model chunk that runs, None without the interleaved schedule."""
    return _virtual["rank"]


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Sets the index of the model chunk that runs."""
    _virtual["rank"] = rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Returns the number of model chunks per stage, None without the interleaved schedule."""
    return _virtual["size"]


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Sets the number of model chunks per stage."""
    _virtual["size"] = size


def get_pipeline_model_parallel_split_rank() -> int | None:
    """Returns the stage at which a decoder follows an encoder, None without one."""
    return _split_rank


def set_pipeline_model_parallel_split_rank(rank: int | None) -> None:
    """Sets the stage at which a decoder follows an encoder."""
    global _split_rank
    _split_rank = rank


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """Returns True on the first stage, and only for its first chunk unless ``ignore_virtual``."""
    is_first_chunk = ignore_virtual or _virtual["size"] is None or _virtual["rank"] == 0
    return is_first_chunk and _rank("pipeline") == 0


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """Returns True on the last stage, and only for its last chunk unless ``ignore_virtual``."""
    size = _virtual["size"]
    is_last_chunk = ignore_virtual or size is None or _virtual["rank"] == size - 1
    return is_last_chunk and _rank("pipeline") == _size("pipeline") - 1


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Returns True for a stage of the encoder, by default this one."""
    if _size("pipeline") == 1 or _split_rank is None:
        return True
    return (_rank("pipeline") if rank is None else rank) < _split_rank


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Returns True for a stage of the decoder, by default this one."""
    if _size("pipeline") == 1 or _split_rank is None:
        return True
    return (_rank("pipeline") if rank is None else rank) >= _split_rank


def is_pipeline_stage_at_split() -> bool:
    """Returns True for the encoder's last stage."""
    rank = _rank("pipeline")
    return is_pipeline_stage_before_split(rank) and is_pipeline_stage_after_split(rank + 1)


def param_is_not_tensor_parallel_duplicate(param: Any) -> bool:
    """Returns True if a parameter is split over ranks, or this is the rank that counts it."""
    return bool(getattr(param, "tensor_model_parallel", False)) or _rank("tensor") == 0

"""State dicts of optimizers whose state is sharded: of whole tensors, or of shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed

from .....comm.collectives import all_gather_rows
from ...optimizers._lists import ListOptimizer
from ._bucket import Bucket


class ShardSaver(ListOptimizer):
    """Base with the state dicts of ``BucketOptimizer``, which has the buckets and their ranks."""

    _buckets: list[Bucket]
    distributed_process_group: Any
    distributed_size: int
    distributed_rank: int

    def init_params(self, params: Iterable[torch.Tensor] | torch.Tensor | None = None) -> None:
        """Makes the buckets and the state of parameters that have none yet."""
        raise NotImplementedError

    def param_sync(self) -> None:
        """Waits for the parameters that are being gathered."""
        raise NotImplementedError

    def _whole(self, bucket: Bucket, shard: torch.Tensor) -> list[torch.Tensor]:
        """Returns a shard's tensors of whole parameters, on the CPU."""
        flat = shard
        if self.distributed_size > 1:
            flat = all_gather_rows(shard, self.distributed_process_group).wait()
        return [piece.cpu().clone() for piece in bucket.pieces(flat)]

    def _numbers(self) -> dict[torch.Tensor, int]:
        """Returns the numbers by which a state dict names parameters."""
        params = (p for group in self.param_groups for p in group["params"])
        return {p: i for i, p in enumerate(params)}

    def _saved_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Returns the shards that a state dict of format 2 has, by name."""
        return bucket.state

    def _load_shards(self, bucket: Bucket, shards: dict[str, torch.Tensor]) -> None:
        """Loads shards of the names of ``_saved_state``."""
        for name, shard in shards.items():
            bucket.state[name].copy_(shard)

    @torch.no_grad()
    def state_dict(
        self, *, state_dict_format: int | None = None, gather_on_root: bool | None = None
    ) -> dict[str, Any]:
        """Returns the state; every rank must call it.

        Args:
            state_dict_format: 2 (None): whole tensors of each parameter on the CPU, as of an
                optimizer on one rank, which any number of ranks can load. 1: shards, for as many
                ranks as now.
            gather_on_root: for format 1, give rank 0 the shards of all ranks, so that its state
                dict alone is enough to save; True by default.

        Returns:
            The state dict.

        Raises:
            ValueError: ``state_dict_format`` is neither 1 nor 2.
        """
        if state_dict_format not in (None, 1, 2):
            raise ValueError(
                f"{type(self).__name__}: state_dict_format must be 1 or 2, got {state_dict_format}"
            )
        self.init_params()
        self.param_sync()
        packed = super().state_dict()["param_groups"]
        if state_dict_format == 1:
            shards = [
                {name: shard.cpu().clone() for name, shard in bucket.state.items()}
                for bucket in self._buckets
            ]
            result = {"state": shards, "param_groups": packed, "format": 1}
            if gather_on_root in (None, True) and self.distributed_size > 1:
                result["gathered_states"] = self._gathered(shards)
            return result
        numbers = {
            p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])
        }
        state: dict[int, dict[str, torch.Tensor]] = {}
        for bucket in self._buckets:
            for name, shard in self._saved_state(bucket).items():
                for p, whole in zip(bucket.params, self._whole(bucket, shard), strict=True):
                    state.setdefault(numbers[p], {})[name] = whole
        return {"state": dict(sorted(state.items())), "param_groups": packed, "format": 2}

    def _gathered(self, shards: list[dict[str, torch.Tensor]]) -> list[Any] | None:
        """Returns the shards of all ranks on the first one, None on others."""
        group = self.distributed_process_group
        root = 0 if group is None else distributed.get_global_rank(group, 0)
        found = [None] * self.distributed_size if self.distributed_rank == 0 else None
        distributed.gather_object(shards, found, dst=root, group=group)
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of either format, or of ``FusedAdam`` on one rank.

        Raises:
            ValueError: the state dict has other parameters or, in format 1, shards of other sizes.
        """
        self.init_params()
        self.param_sync()
        saved = state_dict["state"]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group in self.param_groups:
            own = [bucket for bucket in self._buckets if set(bucket.params) <= set(group["params"])]
            for bucket in own:  # torch has made other groups
                bucket.group = group
        if state_dict.get("format") == 1:
            self._load_local(state_dict)
            return
        numbers = {
            p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])
        }
        for bucket in self._buckets:
            found = {p: saved[numbers[p]] for p in bucket.params if numbers[p] in saved}
            if not found:
                continue
            if len(found) < len(bucket.params):
                raise ValueError(
                    f"{type(self).__name__}: state_dict must have the state of all parameters, got "
                    f"that of {len(found)} of {len(bucket.params)} in a bucket"
                )
            shards = {}
            for name in found[bucket.params[0]].keys() & self._saved_state(bucket).keys():
                shard = torch.zeros(bucket.shard_size, dtype=torch.float32)
                for p, of_param, of_shard in bucket.fragments:
                    shard[of_shard] = found[p][name].reshape(-1)[of_param].float().cpu()
                shards[name] = shard.to(bucket.device)
            self._load_shards(bucket, shards)
            self.param_sync()
            steps = [state["step"] for state in found.values() if "step" in state]
            if steps and "step" not in bucket.group:
                bucket.group["step"] = int(steps[0])

    def _load_local(self, state_dict: dict[str, Any]) -> None:
        """Loads shards of format 1."""
        shards = state_dict["state"]
        gathered = state_dict.get("gathered_states")
        if gathered is not None:
            if len(gathered) != self.distributed_size:
                raise ValueError(
                    f"{type(self).__name__}: state_dict of format 1 must be of "
                    f"{self.distributed_size} ranks, got one of {len(gathered)}; save with "
                    "state_dict_format=2"
                )
            shards = gathered[self.distributed_rank]
        sizes = [bucket.shard_size for bucket in self._buckets]
        found = [len(next(iter(each.values()))) for each in shards]
        if found != sizes:
            raise ValueError(
                f"{type(self).__name__}: state_dict of format 1 must have shards of {sizes} "
                f"elements, got {found}; save with state_dict_format=2"
            )
        for bucket, own in zip(self._buckets, shards, strict=True):
            for name, shard in own.items():
                bucket.state[name].copy_(shard)

"""Random number sequences by name, for draws that must differ between ranks, such as dropout's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CudaRNGStatesTracker:
    """Tracker of named, independent random sequences in one process.

    Random ops inside ``with tracker.fork(name):`` draw from the sequence ``name``, and each block
    continues where the last one with this name ended. The default sequence is not affected.
    Sequences are states of the default generator of the current CUDA device or, on a machine
    without a GPU, of the CPU. The interface is that of Megatron and TransformerEngine.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Removes all sequences and seeds."""
        self._states = {}
        self._seeds = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Returns the generator state of each sequence by name, for ``set_states``.

        States are uint8 tensors on the CPU; later draws do not change them.
        """
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replaces all sequences by ``states``, a result of ``get_states``.

        Raises:
            TypeError: ``states`` is not a dict of tensors.
        """
        if not isinstance(states, dict) or not all(
            isinstance(state, torch.Tensor) for state in states.values()
        ):
            raise TypeError(
                "CudaRNGStatesTracker: states must be a dict of names and tensors, "
                f"got {type(states).__name__}"
            )
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Starts a sequence called ``name`` from ``seed``.

        Raises:
            TypeError: ``name`` is not a str, or ``seed`` is not an int.
            ValueError: ``name`` or ``seed`` was added before.
        """
        for what, value, kind in (("name", name, str), ("seed", seed, int)):
            if not isinstance(value, kind):
                raise TypeError(
                    f"CudaRNGStatesTracker: {what} must be of type {kind.__name__}, "
                    f"got {type(value).__name__}"
                )
        for what, value, known in (("name", name, self._states), ("seed", seed, self._seeds)):
            if value in known:
                raise ValueError(f"CudaRNGStatesTracker: {what} must be new, got {value!r}")
        generator = _generator()
        outside = generator.get_state()
        generator.manual_seed(seed)
        self._states[name] = generator.get_state()
        self._seeds.add(seed)
        generator.set_state(outside)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Makes random ops inside the ``with`` block draw from the sequence called ``name``.

        Raises:
            ValueError: no sequence called ``name`` was added.
        """
        if name not in self._states:
            raise ValueError(
                f"CudaRNGStatesTracker: name must be one of {sorted(self._states)}, got {name!r}"
            )
        generator = _generator()
        outside = generator.get_state()
        generator.set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = generator.get_state()
            generator.set_state(outside)


def _generator() -> torch.Generator:
    """Returns the current CUDA device's default generator, or the CPU's without a GPU."""
    if not torch.cuda.is_available():
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device()]

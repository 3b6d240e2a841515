"""Random states by name, so that some draws differ between ranks while the others agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["CudaRNGStatesTracker"]


class CudaRNGStatesTracker:
    """Keeps states of the default generator by name and forks into one of them.

    The generator is the current CUDA device's, or the CPU's without a GPU. Numbers drawn inside
    ``fork(name)`` come from that name's own sequence and leave the default one as it was. The
    interface is that of Megatron and TransformerEngine.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forgets every name and seed."""
        self._states = {}
        self._seeds = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Returns the states by name, uint8 on the CPU; later draws do not change them."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replaces all states by those that ``get_states`` returned.

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
            ValueError: a name or a seed that was added before.
        """
        for what, value, known in (("name", name, self._states), ("seed", seed, self._seeds)):
            if value in known:
                raise ValueError(f"CudaRNGStatesTracker: {what} must be a new one, got {value!r}")
        generator = _generator()
        outside = generator.get_state()
        generator.manual_seed(seed)
        self._states[name] = generator.get_state()
        self._seeds.add(seed)
        generator.set_state(outside)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draws from the sequence called ``name`` inside the ``with`` block.

        Raises:
            ValueError: a name that was not added.
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
    if not torch.cuda.is_available():
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device()]

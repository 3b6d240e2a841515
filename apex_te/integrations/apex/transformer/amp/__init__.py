"""Loss scaling of models that are split over ranks."""

from .grad_scaler import GradScaler

__all__ = ["GradScaler"]

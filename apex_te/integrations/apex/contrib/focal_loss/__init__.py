"""Sigmoid focal loss."""

from .focal_loss import FocalLoss as FocalLoss
from .focal_loss import focal_loss as focal_loss

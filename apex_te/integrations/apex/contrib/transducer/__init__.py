"""Joint and loss of transducers (RNN-T)."""

from .transducer import TransducerJoint as TransducerJoint
from .transducer import TransducerLoss as TransducerLoss

"""FP8Parameter: a weight that is held in low precision only."""

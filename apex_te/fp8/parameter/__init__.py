"""FP8Parameter, a weight that is held in FP8 only, and torch's ops on it."""

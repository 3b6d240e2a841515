"""FP8 training: regions and recipes, scales and their state, and tensors that hold FP8 data."""

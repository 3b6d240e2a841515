"""Released FP8 checkpoints, and models that hold and write the bytes in their files."""

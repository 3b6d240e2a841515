"""FP8: which regions compute in it, with which scales, and the tensors that hold it."""

"""The functions that apex casts at O1 and O4; here ``torch.autocast`` decides."""

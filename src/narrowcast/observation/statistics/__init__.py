"""Statistics of tensors: ranges exactly, the rest from samples."""

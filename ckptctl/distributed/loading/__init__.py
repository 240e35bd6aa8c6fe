"""Any checkpoint, loaded into a state dict whose tensors may be sharded over ranks."""

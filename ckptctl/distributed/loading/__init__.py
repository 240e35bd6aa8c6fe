"""Loading any checkpoint into a state dict whose tensors may be sharded across ranks."""

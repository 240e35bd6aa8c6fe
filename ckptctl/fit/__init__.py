"""Memory for inference: weights and KV cache of each GPU, computed from the index of a model."""

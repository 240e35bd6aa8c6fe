"""Memory that a model needs for inference: weights and KV cache per GPU, computed from its index."""

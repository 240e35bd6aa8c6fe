"""Places behind URLs: the Hugging Face Hub, and whatever fsspec knows."""

"""Remote storage on the Hugging Face Hub and in fsspec file systems."""

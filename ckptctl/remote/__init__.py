"""Remote storage: the Hugging Face Hub and the file systems of fsspec."""

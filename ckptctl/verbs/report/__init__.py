"""HTML report on a checkpoint's contents, files and findings, and its differences from another."""

"""Conversion pipeline, which plans a conversion, copies the tensors and publishes the output."""

"""From the tensors of one layout to those of another: which they are, and where each lies."""

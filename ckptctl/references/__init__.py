"""References, which list the tensors of models that no table of ckptctl describes."""

"""Any checkpoint read into memory: what is wanted, what is read for it, what is left over."""

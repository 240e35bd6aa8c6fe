"""Leaves that are no tensors, made from the records of their pickles by constructors of our own."""

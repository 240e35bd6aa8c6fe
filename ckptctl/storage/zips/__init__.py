"""Zips written by ``torch.save``, as complete files and as write items of DCP."""

"""Reader and writer of ``torch.save`` zips, which are complete files or write items of DCP."""

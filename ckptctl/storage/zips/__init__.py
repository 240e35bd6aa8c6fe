"""Reader and writer of ``torch.save`` zips, as complete files or as write items of DCP files."""

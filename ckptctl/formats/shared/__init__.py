"""What several formats are read with."""

"""What ranks hold in memory, written as one DCP directory."""

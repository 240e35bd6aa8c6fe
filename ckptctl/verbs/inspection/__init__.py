"""What a checkpoint holds, from its index alone."""

"""What a checkpoint is, from its names and shapes; what a change of layout makes of it."""

"""Code for reading, writing and checking checkpoints that several formats share."""

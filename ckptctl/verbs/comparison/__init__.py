"""How two checkpoints differ, whatever their formats and layouts."""

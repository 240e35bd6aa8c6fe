"""One training run: its manager, and how rank 0 looks after its folder."""

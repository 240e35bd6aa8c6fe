"""An adapter merged into its model while that is converted."""

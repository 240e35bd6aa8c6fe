"""Any checkpoint read into memory: mapped to a state, checked, planned, compared by name."""

"""The processes that work together: agreement, coordination, and their shares of a plan."""

"""What runs on the ranks. Only the children of ``tests.gloo`` import these modules."""

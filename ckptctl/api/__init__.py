"""The public Python functions: the same operations as the commands, with typed results."""

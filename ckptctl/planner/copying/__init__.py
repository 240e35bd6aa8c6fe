"""From transfers to units of work: which bytes are read, where they go."""

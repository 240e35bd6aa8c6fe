"""config.json and params.json: what they state, and each made from the other."""

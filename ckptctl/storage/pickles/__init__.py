"""Reader of pickles that imports and calls nothing that they name, and writer of pickles."""

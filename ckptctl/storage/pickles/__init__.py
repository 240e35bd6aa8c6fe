"""Writer of pickles, and a reader that never imports or calls the globals that a pickle names."""

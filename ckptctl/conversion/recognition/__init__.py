"""Recognition of models from names, shapes and configuration, and changes of layout."""

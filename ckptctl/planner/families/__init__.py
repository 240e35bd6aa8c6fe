"""Model families as text tables, and what they declare besides."""

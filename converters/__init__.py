"""Model families, one file of tables each (``ckptctl.converters`` in a wheel)."""

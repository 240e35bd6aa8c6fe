"""Conversion of transfers to units of work: byte ranges to read, and where to write them."""

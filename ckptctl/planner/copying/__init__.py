"""Division of transfers into tiles, which list the byte ranges to read and to write."""

"""Model families, one file each: tables only, no code; in a wheel ``ckptctl.converters``."""

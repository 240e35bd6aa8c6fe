"""Model families, one file each: tables only, no code."""

__ckptctl__ = True

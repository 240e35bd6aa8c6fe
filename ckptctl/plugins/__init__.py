"""What other packages build on: families, formats and steps of conversions.

:mod:`.families` and :mod:`.formats` stay compatible. What they bring together may move.
"""

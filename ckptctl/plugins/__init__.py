"""What other packages build families and formats from; see :mod:`.families` and :mod:`.formats`.

These two modules stay compatible. What they bring together may move.
"""

"""Plug-in API for other packages: model families, formats and conversion steps.

:mod:`.families` and :mod:`.formats` stay compatible. The modules they import from may move.
"""

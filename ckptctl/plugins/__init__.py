"""Plug-in API for other packages: model families, formats and conversion steps.

:mod:`.families` and :mod:`.formats` stay compatible between versions. The modules that they import
from may be moved.
"""

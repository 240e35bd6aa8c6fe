"""Plugins for other people's trainers, one module for each of them.

A module imports its trainer, and nothing imports it but the user: ``import ckptctl`` imports none.
"""

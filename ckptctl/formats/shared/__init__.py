"""Readers, writers and checks that several formats share."""

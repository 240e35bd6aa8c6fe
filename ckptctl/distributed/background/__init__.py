"""Saves that go on while training does: the state is copied, and written from the copy."""

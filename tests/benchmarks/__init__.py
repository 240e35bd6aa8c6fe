"""Benchmarks, each a module to run: ``python -m tests.benchmarks.convert --help``."""

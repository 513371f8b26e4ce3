"""Runnable examples. Each is a module: ``python -m examples.NAME --help``."""

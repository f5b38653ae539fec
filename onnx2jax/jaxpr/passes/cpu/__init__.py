"""Passes that run on CPUs alone."""

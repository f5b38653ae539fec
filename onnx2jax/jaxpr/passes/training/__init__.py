"""Passes over training steps, whose parameters change with every call."""

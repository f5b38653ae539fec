"""Passes that run on any platform."""

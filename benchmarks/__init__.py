"""Benchmarks, and the models they and the tests share."""

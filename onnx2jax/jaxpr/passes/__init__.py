"""Passes over programs: each is a function from a program to one that computes the same."""

"""Shared test support: small models, random graphs and operands, oracles."""

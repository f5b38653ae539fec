"""What several test files share: small models, random graphs and operands, oracles."""

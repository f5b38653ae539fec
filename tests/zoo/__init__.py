"""Models as exporters write them today, made on the spot: `make test-zoo`, docs/exporters.md."""

"""Graph transformations: rebatching, padding data-dependent shapes, subgraphs, inserted nodes, packed weights."""

"""Text from decoders: caches of fixed length, prefill and step as pure functions, generation as one program."""

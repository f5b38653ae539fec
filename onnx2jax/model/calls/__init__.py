"""Arguments and outputs of a call: checks, padding to buckets, comparison with declarations; and KV caches."""

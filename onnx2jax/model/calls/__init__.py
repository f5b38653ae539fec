"""A call: arguments checked and padded to buckets, outputs compared with their declarations.

KV caches, which a call passes to the next, are here too.
"""

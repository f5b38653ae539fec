"""One call: arguments checked against what the file declares and padded to buckets, results as a caller wants them.

A decoder's caches are here, too: they are what one call hands to the next.
"""

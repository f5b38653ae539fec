"""What is wrong with a file: every rule of the format, all at once, where it is broken and how to mend it.

The importer stops at the first; here all of them are collected, with hints for mending.
"""

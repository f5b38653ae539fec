"""Where arrays lie on many devices: a user's rules by name, and the device configurations of a file.

Both end as NamedShardings over one mesh; the values that are computed stay the same.
"""

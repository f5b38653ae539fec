"""Text from decoders: caches of fixed length, prefill and step as pure functions, generation as one program.

- ``files``: from files to a decoder; ``decoder``: what people call; ``prompts``: what they give.
- ``steps``: the two pure functions; ``cache``: what they hand on.
- ``branches``, ``in_place``: graphs made for that; ``compared``: whether the numbers stay what they were.
- ``loop``, ``beam``, ``speculative``: programs made of them; ``sampling``: which token comes next.
"""

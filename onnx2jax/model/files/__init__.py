"""Models in files: saved with new weights, two joined into one, exported as programs for other machines.

What was exported is loaded here as well.
"""

"""What a user holds: a file becomes a Model, a Model is called with arguments, and goes back into a file.

A Model is a graph with its parameters; everything about running it is asked of the rooms below.
"""

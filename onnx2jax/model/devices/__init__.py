"""A model in stages on several devices: how nodes are shared out, how the parts of a batch go through the stages.

And what lies where, what is sent, and what it costs, as tables and on paper.
"""

"""Training: by what a file says of itself (TrainingModel), or by a loss of the user's (finetune).

Both are functions of a state, a pytree, which checkpoints keep and progress bars follow.
"""

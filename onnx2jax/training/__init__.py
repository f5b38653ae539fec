"""Training: by what a file says of itself (TrainingModel), or by a loss of the user's (finetune).

Both are functions of a state, a pytree, run by one engine; checkpoints keep it and progress bars follow.
"""

"""Training: by what a file says of itself (TrainingModel), or by a loss of the user's (finetune).

Both are functions of a state, a pytree, run by one engine; checkpoints keep it and progress bars follow.

- ``file``, ``training_model``: what a file says of its training; ``artifacts``: what onnxruntime's tools made for it.
- ``finetune``: a loss of the user's. ``finetune_arguments`` checks, ``weights`` tells which parameters learn, ``form``
  makes the graph for training, ``lora`` adds adapters, ``decoders`` knows the loss of next tokens, ``objective`` is the
  loss as a function of parameters.
- ``modules``: a model inside flax or equinox.
- ``engine``, ``state``, ``checkpoint``, ``progress``: for all of them.
"""

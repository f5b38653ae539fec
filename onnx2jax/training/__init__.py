"""Training: by the file's own ``training_info`` (TrainingModel), or with a user's loss and optimizer (finetune).

Both are update functions of a state pytree, compiled and run by one engine.

- ``file``, ``training_model``: training_info; ``artifacts``: onnxruntime's on-device training.
- ``finetune``: a user's loss. ``finetune_arguments`` validates, ``weights`` selects the parameters to train, ``form``
  rewrites the graph for training, ``straight_through`` passes gradients through rounding, ``lora`` adds adapters,
  ``decoders`` has the next-token loss, ``packing`` packs texts into rows, ``objective`` is the loss as a function of
  parameters.
- ``modules``: a model as a flax or equinox module.
- ``engine``, ``state``, ``checkpoint``, ``progress``: shared by all of them.
"""

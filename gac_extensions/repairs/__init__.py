"""Zero-pad compressed checkpoints of others to dims that run fast, without changing their outputs.

Read in this order: ``contract`` (the padded dim), ``weight_files`` (the files), ``dims`` (the places of a dim in the
tensors, and its GEMMs), ``layouts`` and ``planned`` (the dims of a checkpoint), ``times``, ``run``.
"""

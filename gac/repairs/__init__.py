"""Zero-pad what someone else compressed to dims that run fast, without changing its outputs.

Read in this order: ``contract`` (what a dim may become), ``shared_dims`` (where a dim lies in the tensors, and which
GEMMs it moves), ``weight_files`` (the files), ``layouts`` (which shared dims a checkpoint has), ``times``, ``adopted``
(what becomes a checkpoint of GAC), ``run``.
"""

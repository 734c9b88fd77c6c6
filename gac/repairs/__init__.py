"""Zero-pad what someone else compressed to dims that run fast, without changing its outputs.

Read in this order: ``contract`` (what a dim may become), ``seams`` (where a dim lies in the tensors, and which GEMMs it
moves), ``stored`` (the files), ``layouts`` (which seams a checkpoint has), ``times``, ``run``.
"""

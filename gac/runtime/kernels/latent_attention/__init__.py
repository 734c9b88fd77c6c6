"""Attention of one new token over a cache of latents, in two launches.

- ``layout``: how second factors, positions and rotations lie in memory.
- ``read``: loads of latents into registers.
- ``scores``: keys from latents, rotated, times queries.
- ``attend``: softmax and the weighted sum of value latents; and the second launch, which joins the parts of a context.
- ``launch``: launch parameters, and the operator.

A program takes one key-value head with all of its queries, and a part of the context. Its warps do not wait for each
other. A step of a warp takes 32 tokens: two tiles of 16.

**Layout.** Products are PTX's ``mma.m16n8k16``. Thread ``4 i + j`` of a warp (i from 0 to 7, j from 0 to 3) holds:

=================================== ======================== =======================================
matrix                              rows                     columns
=================================== ======================== =======================================
left: latents, 16 tokens x 16       tokens i and i + 8       numbers 2j, 2j + 1, 2j + 8, 2j + 9
right: second factor, 16 x 8        the same numbers         feature i of 8
result: keys, 16 tokens x 8         tokens i and i + 8       features 2j and 2j + 1
=================================== ======================== =======================================

- Two products give 8 pairs of features that rotate together: the first features, then the second ones. So a thread
  has both features of pairs 2j and 2j + 1 in registers, and rotates them there.
- Rotated keys are left matrices of the product with queries as they lie: no number changes its thread.
- All keys of a thread are rotated by the angle of token i of the first tile. Queries make up for it: of the 8 columns
  of the right matrix, 0 to 3 are four queries for tokens 0 to 7, and 4 to 7 the same queries rotated back by 8
  positions, for tokens 8 to 15; in the second tile by 16 more. From step to step the angle advances by a constant.
- Values stay latents. Weights of the softmax are right matrices of the product with them, transposed in registers.
"""

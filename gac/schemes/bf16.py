"""16-bit weights, as they were loaded."""

from typing import TYPE_CHECKING

from gac.schemes.base import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from gac.schemes.inputs import Inputs


class Bf16(Scheme):
    """Every number as it was loaded, and counted as 16 bits."""

    name = "bf16"
    dtype = "bf16"
    bits = 16
    meaning = "16 bits, as loaded"
    for_embeddings = True
    lossy = False

    def quantised(
        self, matrix: "Tensor", inputs: "Inputs | None" = None, gradients: "Tensor | None" = None
    ) -> "Tensor":
        return matrix

"""The dims that the published study found PaLU's score to give heads."""

from typing import TYPE_CHECKING

from gac.reporting.page import ALIGNED, COLOURS, DOTTED, panel
from gac_extensions.lab.studies import published

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEAD_DIM = 128  # of Llama-3-8B, whose heads were scored


def published_heads(*, ax: "Axes | None" = None) -> "Axes":
    """The published dims of PaLU's key-value heads on Llama-3-8B, one mark a dim, and the multiples of 8 about them.

    The study lists which dims occur and how many heads have an aligned one, not which head has which dim. A GacError
    says if matplotlib is missing.
    """
    dims, (heads,), (aligned,) = map(published.palu, ("unique_dims", "kv_heads", "aligned_to_8"))
    aligned_colour, other_colour = COLOURS[:2]
    with panel(ax, (5.6, 1.9)) as ax:
        for step in range(dims[0] // ALIGNED * ALIGNED, HEAD_DIM + 1, ALIGNED):
            ax.axvline(step, **DOTTED)
        multiples, others = ([dim for dim in dims if (dim % ALIGNED == 0) == even] for even in (True, False))
        label = f"{heads - aligned} heads: these, no multiples of 8"
        ax.plot(
            multiples, [0] * len(multiples), "s", color=aligned_colour, ms=8, label=f"{aligned} heads: a multiple of 8"
        )
        ax.plot(others, [0] * len(others), "o", mec=other_colour, mfc="none", ms=8, label=label)
        for dim in dims:
            ax.annotate(str(dim), (dim, 0), (0, 9), textcoords="offset points", ha="center", fontsize=7)
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        ax.set_xlim(dims[0] - 3, HEAD_DIM + 1)
        ax.set_xlabel("dims of a head (dotted: multiples of 8; the dense head has 128)")
        ax.set_title(f"published: PaLU's score on {heads} key-value heads of Llama-3-8B", pad=4)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=2)
    return ax

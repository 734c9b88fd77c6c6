"""Results that show themselves: a table in a terminal, HTML in a notebook, a pandas DataFrame.

What is shown is decided in ``gac.reporting.results``, which is loaded when something is to be shown.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gac.core.errors import GacError

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import RenderableType


class Shown:
    """A result that shows itself; a subclass is a dataclass with ``repr=False``, known to ``gac.reporting.results``."""

    def __rich__(self) -> "RenderableType":
        """The table that rich prints."""
        return _results().table_of(self)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        """The table as text, at most 100 columns wide."""
        return _results().text_of(self)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str:
        """The table as HTML, everything in it escaped."""
        return _results().html_of(self)  # type: ignore[no-any-return]

    def to_dataframe(self) -> "DataFrame":
        """The result as a pandas DataFrame.

        A plan has one row a weight; what is known of a site alone (``site_loss``, ``site_latency_ns WORKLOAD``) stands
        in each row of its weights. A plan of tokens has one row a layer, a profile one a measurement, a frontier one a
        point, cliffs one a collapsed dim or sweet spot, a perplexity is one row.

        Raises:
            GacError: pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as failure:
            given = "pandas is not installed"
            raise GacError(given, "it, for a DataFrame", "Run pip install pandas.") from failure
        return DataFrame(_results().rows_of(self))


def _results() -> Any:
    return import_module("gac.reporting.results")

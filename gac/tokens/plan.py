"""The plan of tokens kept, under the name by which callers of this room import it."""

from gac.token_plan import LayerTokens, TokenPlan

__all__ = ["LayerTokens", "TokenPlan"]

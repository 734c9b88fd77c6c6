"""One page for a plan: HTML that needs nothing but itself."""

"""The plan and what it is made of: recipe, choices, costs, evidence. Loads no torch."""

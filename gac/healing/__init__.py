"""HEAL: a compressed model trained for minutes towards the dense one, in the forms and schemes that it has."""

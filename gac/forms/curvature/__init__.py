"""Second-order metrics that price the error of a weight."""

"""How many tokens each layer's cache keeps: chosen by the knapsack, evicted by a press of kvpress."""

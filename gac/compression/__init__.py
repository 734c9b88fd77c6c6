"""Apply: make the model small."""

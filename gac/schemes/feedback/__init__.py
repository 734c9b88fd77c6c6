"""Rounding one number after the other, so that those that follow make up for what each one's rounding costs."""

"""The processes of one run of torchrun: their ranks, communication, and the end of one of them."""

"""The processes of one run, as torchrun starts them: who each is, what travels between them, and how one ends."""

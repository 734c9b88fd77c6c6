"""Extensions of GAC, which it asks for by name: published studies, tokens to cache, repairs, peers, GGUF."""

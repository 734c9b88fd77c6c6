"""Export a compressed model as one GGUF file, which llama.cpp reads."""

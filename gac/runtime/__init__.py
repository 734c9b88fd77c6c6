"""What runs. Imports torch, transformers, triton and itself; these very files lie beside a checkpoint's weights."""

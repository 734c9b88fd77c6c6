"""What runs: modules, shared GEMMs, kernels, the modelling file. Imports torch, transformers, triton and itself."""

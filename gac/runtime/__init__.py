"""Run compressed models: classes, modules, storages, kernels."""

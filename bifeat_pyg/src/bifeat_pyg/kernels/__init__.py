"""Gather, unpack and dequantize: a plain torch reference, C for the CPU, Triton for the GPU.

`reference` states what is computed; `cpu` and `triton_gather` compute the same faster and are
tested against it. Nothing here decides which one runs: that is `bifeat_pyg._dispatch`.
"""

"""Numerical kernels over many groups at once; each has a plain reference to be tested against."""

"""Arithmetic on the CPU in one pass over memory: machine code by numba, with the bits of torch's operations."""

OF_BF16, OF_INT8, OF_FP4, OF_TOP_K = 1, 2, 3, 4
"""The numbers by which `ftopt.kernels.codecs` knows the codecs; 0: it has no kernels."""

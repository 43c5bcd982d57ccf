"""Arithmetic on the CPU in one pass over memory: machine code by numba, with the bits of torch's operations."""

OF_INT8, OF_FP4, OF_TOP_K = 1, 2, 3
"""The codecs that have kernels, by the number that `ftopt.kernels.codecs` knows them by; 0: it has none."""

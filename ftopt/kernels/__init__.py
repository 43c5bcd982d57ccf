"""Arithmetic on the CPU in one pass over memory: machine code by numba, with the bits of torch's operations."""

"""CuTe-DSL helpers that rendered kernels import. Invariant code: structure lives in templates, numbers in the plan.

Addresses are what PTX takes: shared memory as a 32-bit address in the shared window, TMEM as ``lane << 16 | column``.
"""

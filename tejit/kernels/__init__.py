"""Stateless numerics on plain tensors and numbers: references, ops with fakes, GEMM, the choice of backend."""

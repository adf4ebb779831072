"""Sampling as one op: parameters, the specification, and its numpy implementation."""

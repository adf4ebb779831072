"""What timing tactics on a GPU needs beside the tactics: made-up operands and a comparison, on the device.

`hashed.py` defines the operands' values in numpy, `triton.py` makes the same on the GPU and compares
results there, `tools.py` says how these kernels are called. Importing this package imports neither.
"""

"""Many engines from one file that says which. See README.md; `build_matrix` is the whole of it."""

"""Checks and times the tactics of a pack on a GPU. See README.md."""

"""Decisions of the schedulers as a file, and that file as steps again. See README.md."""

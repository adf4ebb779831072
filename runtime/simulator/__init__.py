"""The very same loop and schedulers over an executor that computes nothing. See README.md."""

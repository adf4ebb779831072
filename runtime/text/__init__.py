"""Text on its way in and out: chat templates, incremental detokenization, stop strings."""

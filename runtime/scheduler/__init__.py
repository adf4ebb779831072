"""Who may hold pages (capacity) and who runs this step (micro-batch)."""

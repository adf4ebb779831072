"""Engine sets in a store: any place fsspec reaches, content-addressed. See README.md."""

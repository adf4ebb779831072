"""Measuring an engine with nothing but the runtime: `tapeout bench`. See README.md."""

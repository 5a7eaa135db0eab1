"""The Marlin layout: pure functions, no I/O."""

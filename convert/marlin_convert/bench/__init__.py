"""Benchmarks: medians and ratios within one run, since machines and disks differ and are shared."""

"""Turns become root-to-leaf token paths: `tree` joins them, `prefix_breaks` says why a path began anew."""

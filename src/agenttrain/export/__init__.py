"""A policy becomes a folder for others (`exporting`), held against what it is known to have answered."""

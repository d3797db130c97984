"""A complete plugin for agenttrain; start reading in `plugin`."""

"""Code of several recipes: provenance of results, tables, plots, sweeps."""

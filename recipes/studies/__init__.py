"""Studies that are not the paper's: their settings, results, and data made for them."""

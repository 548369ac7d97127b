"""What several recipes use: where a result comes from, tables, plots."""

"""Checks of model, loss, collator and data set, before the first release and during the run."""

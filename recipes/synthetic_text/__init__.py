"""Differentially private synthetic text: train, generate, filter, classify, evaluate, publish."""

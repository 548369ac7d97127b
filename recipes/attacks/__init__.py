"""Attacks on trained models."""

"""Measurements: one command measures and writes CSV rows with their provenance, another only draws from CSV."""

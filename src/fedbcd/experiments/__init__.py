"""Recipes: jobs described by a file, comparisons, pictures."""

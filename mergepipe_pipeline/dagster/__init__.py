"""The public door for projects of others: resource, builders of definitions, translator."""

"""What planning may know: contents, statistics and facts of whole tensors, from the catalog or
from one pass over what it lacks.

Knows models and recipes, not how they were found (`resolution`) nor what is decided from them.
"""

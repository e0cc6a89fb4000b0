"""What planning may know: contents, statistics and facts of whole tensors, from the catalog or
from one pass over what it lacks.

Works on models and recipes; `resolution` finds them, `planner` decides from the facts.
"""

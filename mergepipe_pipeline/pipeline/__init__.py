"""The verbs: what a person or Dagster can ask for, each in the module of its name.

A verb takes a `Warehouse` and plain arguments, calls the rooms below in order, and returns a frozen
dataclass. The CLI and the assets call these and nothing below them. Rooms that import torch
(analysis, engine) are imported when a verb runs, so that loading definitions or printing help stays
quick.
"""

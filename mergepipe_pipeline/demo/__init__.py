"""The demo: a family of small models trained on the spot, landed, merged under budgets and scored.

`skills` are the tasks, `family` the training, `run` the way from inbox to table. Not imported by
the core.
"""

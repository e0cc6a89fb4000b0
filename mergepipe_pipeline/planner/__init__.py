"""Arrays in, access set out: which blocks a budget covers, and what that costs in error.

Torch-free. `parts` lays out what can be read at which level, `strategies` rank it, `selection`
spends a budget, `bounds` prove and `samples` estimate what that loses, `plan_builder` makes the
`MergePlan`.
"""

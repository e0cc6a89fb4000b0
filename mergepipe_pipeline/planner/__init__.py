"""Arrays in, access set out: which blocks a budget covers, and what that costs in error.

Torch-free. `candidates` lays the choices out flat, `strategies` chooses, `bounds` proves, `build`
turns the choice into a `MergePlan`.
"""

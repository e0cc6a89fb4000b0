"""Facts of the domain as frozen dataclasses: no I/O, no torch, no pydantic.

`checkpoint` says what files hold, `layers` and `blocks` how tensors are cut, `recipe` what is
wanted, `plan` what will be read and computed, `snapshot` what was published.
"""

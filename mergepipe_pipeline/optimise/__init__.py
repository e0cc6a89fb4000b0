"""Multi-objective search in the unit cube: pure maths on points and values, without any I/O.

Every objective is maximised. Proposers are pure functions of what is known, so that a search which
was killed goes on from its ledger with the same proposals. Loading the package loads neither torch
nor BoTorch; `async` and `sync` need the extra `search`, the other methods torch alone.
"""

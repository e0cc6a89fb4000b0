"""How long a merge takes: what this machine is measured to do, and what follows from it."""

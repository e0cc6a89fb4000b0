"""The command `mergepipe`: one function per verb, thin over `verbs`.

Verbs are imported inside the commands, so that `--help` answers at once and never loads torch.
"""

"""Evaluators, verdicts and gates."""

"""Campaigns against the whole product: faults, kills, flips, hostile inputs, states."""

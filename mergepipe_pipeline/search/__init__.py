"""The search for merges along a front: its file, its ledger, its candidates and its loop."""

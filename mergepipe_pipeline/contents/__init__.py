"""What the tensors of checkpoints hold: digests, and segments that reads are compared with."""

"""The only package that opens files: checkpoints in, shards out, and every rename, link and fsync."""

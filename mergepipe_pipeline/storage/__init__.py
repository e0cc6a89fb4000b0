"""The only package that opens files, and the home of every rename, link and fsync."""

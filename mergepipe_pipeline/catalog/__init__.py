"""What is known about checkpoints, as immutable Parquet facts; DuckDB reads, nothing is locked.

`catalog` is the way in, `tables` the encoding, `queries` every SQL statement
over the documented `views`.
"""

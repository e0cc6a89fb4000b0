"""What is known about checkpoints, as immutable Parquet facts; DuckDB reads, nothing is locked.

`catalog` is the way in, with `contents`, `pairs` and `places` for what is known of one id;
`arrow_tables`, `stats_tables` and `row_groups` are the encoding, `seals` the one reader and writer
of files, `formats` the folders and their versions, `queries` every SQL statement over the
documented `views`.
"""

"""Tests of the Parquet facts and the SQL over them."""

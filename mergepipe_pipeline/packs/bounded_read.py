"""Reads Parquet files with a bound of memory and time; the only thing it says is how it ends.

It is run as a program of its own, as `python -I bounded_read.py NBYTES SECONDS FILE...`.
"""

from __future__ import annotations

import os
import resource
import sys

os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # others reserve what they do not need

import pyarrow as pa
import pyarrow.parquet as pq

#: Of one text of a footer, and of one list in it: far above those of any table.
_MOST_FOOTER_NBYTES, _MOST_ITEMS = 64 << 20, 1 << 20


def main(most_nbytes: int, limit_s: int, paths: list[str]) -> None:
    """Read every row of every file."""
    pa.set_cpu_count(1)
    with open("/proc/self/statm") as file:  # in pages; the sixth is data and stack
        used = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + most_nbytes, used + most_nbytes))
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for path in paths:
        parquet = pq.ParquetFile(
            path,
            pre_buffer=False,
            thrift_string_size_limit=_MOST_FOOTER_NBYTES,
            thrift_container_size_limit=_MOST_ITEMS,
        )
        rows = sum(parquet.metadata.row_group(n).num_rows for n in range(parquet.num_row_groups))
        if rows != parquet.metadata.num_rows:
            raise ValueError(f"{rows} rows, and {parquet.metadata.num_rows} in the footer")
        if os.path.basename(path).startswith("index."):  # read whole, the others in parts
            parquet.read(use_threads=False).to_pylist()
        for number in range(parquet.num_row_groups):
            parquet.read_row_group(number, use_threads=False).to_pylist()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

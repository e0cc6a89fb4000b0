"""Which of mergekit's tests fail with our command, and which behaviour of its they assert."""

from __future__ import annotations

_ROWS = "asserts a refusal: here rows are cropped to the base's, with a warning"
_CONFIG = (
    "asserts a config.json that counts rows which the result does not have: no library loads it"
)
_TRUNCATED = "embedding_truncation.py::test_truncation_"

#: Test to what it asserts that we do otherwise.
EXPECTED: dict[str, str] = {
    "tokenizer.py::TestTokenizerMerges::test_mismatched_vocabulary_requires_alignment": _ROWS,
    **{
        f"embedding_truncation.py::test_default_and_allow_crimes_do_not_truncate[{given}]": _ROWS
        for given in (False, True)
    },
    **{
        f"{_TRUNCATED}preserves_donor_config[{method}]": _CONFIG
        for method in ("linear", "slerp", "task_arithmetic")
    },
    "embedding_truncation.py::test_embedding_and_head_are_truncated_independently": _CONFIG,
    **{f"{_TRUNCATED}copies_out_of_range_metadata[{given}]": _CONFIG for given in (False, True)},
}

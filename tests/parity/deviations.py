"""Which tests show each row of the table of differences in docs/mergekit.md to mergekit.

Together the tests of a row show both sides: mergekit as it runs here, and us.
"""

from __future__ import annotations

_REFUSED = (
    "test_deviations.py::test_mergekit_refuses",
    "test_deviations.py::test_we_merge_what_mergekit_refuses",
)
_NUMBERS, _INPUTS = "test_numeric_deviations.py", "test_input_deviations.py"

#: First column of the table to tests, as files of this folder and functions.
DEVIATIONS: dict[str, tuple[str, ...]] = {
    "arithmetic, adapters, rows for tokens that a model lacks": (
        f"{_NUMBERS}::"
        "test_arithmetic_is_in_float32_where_mergekit_rounds_inputs_and_steps_to_dtype",
        f"{_INPUTS}::test_adapters_are_exact_here_and_rounded_to_the_models_dtype_in_mergekit",
        f"{_INPUTS}::test_means_for_tokens_that_a_model_lacks_are_float32_here_and_in_dtype_in_mergekit",
    ),
    "arcee_fusion, ramplus_tl without `dtype`": (
        "test_dtypes.py::test_a_mask_makes_every_weight_float32_in_mergekit_and_none_here",
    ),
    "equal magnitudes at a trim": (
        f"{_NUMBERS}::test_of_equal_magnitudes_we_keep_the_lowest_indices_and_mergekit_others",
    ),
    "DARE, DELLA masks": (
        f"{_NUMBERS}::test_masks_of_a_tensor_depend_on_others_in_mergekit_and_not_here",
        "test_distributions.py::test_elements_are_kept_with_the_probability_of_their_rank",
        "test_distributions.py::test_blocks_threads_and_windows_change_no_bit",
    ),
    "DELLA on rows of one element": (
        f"{_NUMBERS}::"
        "test_della_on_rows_of_one_element_fails_in_mergekit_and_keeps_at_density_here",
        *_REFUSED,
    ),
    "DELLA, `nuslerp_row_wise` on 3-D tensors": (
        f"{_NUMBERS}::"
        "test_della_ranks_along_the_last_dimension_where_mergekit_ranks_along_the_second",
        f"{_NUMBERS}::"
        "test_nuslerp_takes_columns_over_all_rows_where_mergekit_takes_them_along_dimension_0",
    ),
    "arcee_fusion": (
        f"{_NUMBERS}::test_arcee_fusion_takes_exact_quantiles_where_mergekit_samples_a_million",
        f"{_NUMBERS}::test_arcee_fusion_divides_in_float64_where_float32_is_mostly_rounding",
    ),
    "spherical methods": (
        f"{_NUMBERS}::test_angles_come_from_float64_sums_where_mergekit_sums_in_float32",
    ),
    "multislerp of zeros; ramplus_tl with `epsilon: 0` where no expert changes": (
        *_REFUSED,
        "test_deviations.py::test_mergekits_ramplus_divides_zero_by_zero_and_ours_keeps_the_base",
    ),
    "weights that sum to zero; a negative `r` or `alpha`; lengths of NaN or infinity": (
        "test_deviations.py::test_mergekit_makes_models_that_are_not_finite",
        "test_deviations.py::test_we_make_no_model_that_is_not_finite",
        "test_deviations.py::test_factors_that_shrink_lone_changes_are_refused_here",
        "test_deviations.py::test_models_that_are_not_finite_are_not_measured_against_each_other",
    ),
    "linear, passthrough with an unlisted base without weight": _REFUSED,
    "more or fewer embedding rows than the base": (
        f"{_INPUTS}::test_mergekit_refuses_other_numbers_of_embedding_rows_and_we_go_by_the_bases",
    ),
    "tensors of the base, or of a first model, that no other model has (MTP, value heads)": (
        f"{_INPUTS}::test_a_part_of_the_base_alone_is_left_out_by_mergekit_and_copied_here",
    ),
    "`--unsafe-truncate-embeddings`": (
        "test_output_options.py::"
        "test_truncated_vocabularies_are_the_shortest_as_in_mergekit_and_so_says_the_config",
    ),
    "tied base, untied expert": (
        f"{_INPUTS}::"
        "test_the_head_of_an_untied_expert_stays_tied_in_mergekits_config_and_not_in_ours",
        "test_tied_adapters.py::"
        "test_a_model_with_an_adapter_is_what_peft_merges_and_mergekit_loads",
    ),
    "a model without a head whose config ties none": (
        f"{_INPUTS}::"
        "test_mergekit_takes_the_embedding_of_a_model_without_a_head_for_one_and_we_the_bases",
    ),
    "slices of `layer_types`; BertModel, GPT-NeoX; a model twice; other architectures": (
        *_REFUSED,
        "test_deviations.py::test_kinds_of_layers_are_sliced_like_the_layers",
        "test_deviations.py::test_mergekit_asks_for_buffers_that_gpt_neox_files_no_longer_have",
        "test_spellings.py::test_a_model_listed_twice_counts_twice_as_two_folders_do_in_mergekit",
        "test_spellings.py::test_models_of_two_architectures_with_equal_names_are_warned_about",
    ),
    "head after slices of unequally many models, or of an unknown architecture": (
        "test_deviations.py::test_mergekit_leaves_sources_of_the_last_slice_out_of_the_head",
        "test_deviations.py::"
        "test_the_head_of_an_architecture_unknown_to_mergekit_is_the_first_slices_there",
    ),
    "hub and fused mixtures, hub and saved GPT-2": (
        "test_layouts.py::test_a_model_with_other_names_merges_as_in_mergekit",
        "test_layouts.py::test_experts_apart_and_fused_merge_as_the_base_has_them",
        "test_layouts.py::"
        "test_filters_see_the_names_of_the_base_and_in_mergekit_those_of_transformers",
    ),
    "trims, lengths and angles of a mixture stored expert by expert": (
        "test_layouts.py::test_experts_stored_apart_are_trimmed_apart_and_by_mergekit_as_one",
        "test_layouts.py::test_experts_apart_and_fused_merge_as_the_base_has_them",
    ),
    "new token ids of `union`": (
        f"{_INPUTS}::"
        "test_new_tokens_of_a_union_have_other_ids_on_every_run_of_mergekit_and_the_same_here",
    ),
    "`chat_template: alpaca`, `mistral`, `llama3`, `exaone`": (
        f"{_INPUTS}::test_chat_templates_by_name_render_as_mergekits_for_chatml_alone",
    ),
    "a `density` below 0, an empty `layer_range` before the last slice, one in quotes": (
        f"{_INPUTS}::test_mergekit_takes_settings_without_a_meaning_and_we_refuse_them",
    ),
    "layers of other shapes or tensors than the result's config asks for": (
        f"{_INPUTS}::test_mergekit_stacks_layers_that_no_config_describes_and_we_refuse_them",
    ),
    "unknown keys": (f"{_INPUTS}::test_mergekit_ignores_unknown_keys_and_we_refuse_them",),
    "`.bin` files": (f"{_INPUTS}::test_mergekit_loads_pickles_and_we_refuse_them",),
}

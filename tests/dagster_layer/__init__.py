"""Tests of dagster_layer."""

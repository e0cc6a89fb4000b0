"""Tests of addresses, against real servers on this machine."""

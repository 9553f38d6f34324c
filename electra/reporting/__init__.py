"""Comparison of runs: tables and plots."""

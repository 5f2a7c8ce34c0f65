"""Tests that share a cluster."""

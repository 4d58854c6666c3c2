"""Tests; flat files named after modules."""

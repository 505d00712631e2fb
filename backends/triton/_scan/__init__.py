"""Scans over time that are chained from one program to the next."""

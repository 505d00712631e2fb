"""Chained scans over time: each program waits for the state of the previous one."""

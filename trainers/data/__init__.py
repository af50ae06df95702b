"""Input: Criteo click logs (prepared from TSV, or in the MLPerf layout), a synthetic stand-in, and random lookups.

`launch.prepare_criteo` and `launch.generate_criteo` work without torch; what trains imports `trainers.<family>.batches`.
"""

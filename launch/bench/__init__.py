"""Benchmarks of the operators: `python -m launch.bench op=embedding_all_to_all ranks=2 device=cpu out=FILE.json`."""

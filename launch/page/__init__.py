"""The comparison: run directories in; a table, `summary.json` and one self-contained page out.

`runs` reads, `comparison` pairs each run with its baseline and judges, `table`, `charts` and `html` show. All of them
show the same `Comparison`, so the table, the page and the JSON cannot disagree.
"""

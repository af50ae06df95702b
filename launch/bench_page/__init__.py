"""A page from the rows of launch.bench: `python -m launch.bench_page ROWS.json... --out PAGE.html` (or `.md`).

`results` reads the rows and works out the ratios, the two templates show them; nothing in a page is written by hand.
"""

"""Everything behind the command line: data, networks, training, runs, reports, and a recipe per figure or table."""

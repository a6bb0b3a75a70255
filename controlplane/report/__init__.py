"""One recorded run as one page that needs nothing else."""

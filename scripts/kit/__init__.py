"""What the scripts share: a fleet of processes, an open-loop load generator, figures and tables."""

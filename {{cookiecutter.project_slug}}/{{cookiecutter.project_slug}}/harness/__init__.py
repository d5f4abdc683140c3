"""The machine: gates, checks, loop, instruments. It never imports the four files that are yours."""
